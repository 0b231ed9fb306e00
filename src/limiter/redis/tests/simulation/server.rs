//! The simulated Redis: the crate's own scripts, in Lua 5.1, over a table of values that expire in simulated time.
//!
//! It has the commands that the scripts use, and Lua's `struct` as far as they use it. A test compares it with a real
//! server.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use bytes::Bytes;
use mlua::{Function, Lua, MultiValue, Table, Value};

/// A server's data.
#[derive(Clone, Debug, Default)]
pub(in crate::limiter::redis) struct Server {
    pub(super) keys: BTreeMap<Bytes, Entry>,
    /// The names of the scripts that it knows.
    scripts: BTreeSet<String>,
    /// The time of the call that runs, in microseconds.
    now_us: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    value: Stored,
    /// The last millisecond in which it is there. `None` if it stays for ever.
    pub(super) until_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stored {
    Text(Bytes),
    List(VecDeque<Bytes>),
}

/// The reply to a command of a script, or to a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::limiter::redis) enum Reply {
    Nil,
    Done,
    Integer(i64),
    Text(Bytes),
    List(Vec<Bytes>),
    Error(String),
}

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

impl Server {
    /// Runs a script by its name or its text, at this time.
    pub(in crate::limiter::redis) fn eval(
        &mut self,
        command: &str,
        script: &str,
        keys: &[Bytes],
        args: &[Bytes],
        now_us: u64,
    ) -> Reply {
        self.now_us = now_us;
        let name = if command == "EVAL" {
            let name = INTERPRETER.with(|interpreter| interpreter.compile(script));
            self.scripts.insert(name.clone());
            name
        } else {
            script.to_owned()
        };
        if !self.scripts.contains(&name) {
            return Reply::Error("NOSCRIPT No matching script.".to_owned());
        }
        DATA.with(|data| data.replace(Some(std::mem::take(self))));
        let reply = INTERPRETER.with(|interpreter| interpreter.run(&name, keys, args));
        *self = DATA.with(|data| data.take()).expect("the interpreter leaves it there");
        reply
    }

    /// Forgets all scripts.
    pub(super) fn flush_scripts(&mut self) {
        self.scripts.clear();
    }

    /// Removes what is over at this time. Returns the keys.
    pub(super) fn expire(&mut self, now_us: u64) -> Vec<Bytes> {
        let is_over = |entry: &Entry| entry.until_ms.is_some_and(|until| now_us / 1_000 > until);
        let over: Vec<Bytes> =
            self.keys.iter().filter(|(_, entry)| is_over(entry)).map(|(key, _)| key.clone()).collect();
        over.iter().for_each(|key| drop(self.keys.remove(key)));
        over
    }

    fn get(&mut self, key: &Bytes) -> Option<&mut Entry> {
        self.expire(self.now_us);
        self.keys.get_mut(key)
    }

    fn list(&mut self, key: &Bytes) -> Result<Option<&mut VecDeque<Bytes>>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Entry { value: Stored::List(list), .. }) => Ok(Some(list)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn remove_if_empty(&mut self, key: &Bytes) {
        if matches!(self.keys.get(key), Some(Entry { value: Stored::List(list), .. }) if list.is_empty()) {
            self.keys.remove(key);
        }
    }

    fn command(&mut self, words: &[Bytes]) -> Result<Reply, String> {
        let number = |at: usize| -> Result<i64, String> {
            let text = words.get(at).and_then(|word| std::str::from_utf8(word).ok());
            text.and_then(|text| text.parse().ok()).ok_or("ERR value is not an integer or out of range".to_owned())
        };
        let key = || words.get(1).cloned().ok_or("ERR wrong number of arguments".to_owned());
        let now_ms = self.now_us / 1_000;
        let text = |bytes: &Bytes| Reply::Text(bytes.clone());
        match (words.first().map(|word| &**word), words.len()) {
            (Some(b"TIME"), 1) => {
                let (seconds, rest) = (self.now_us / 1_000_000, self.now_us % 1_000_000);
                Ok(Reply::List(vec![seconds.to_string().into(), rest.to_string().into()]))
            }
            (Some(b"GET"), 2) => match self.get(&key()?) {
                None => Ok(Reply::Nil),
                Some(Entry { value: Stored::Text(value), .. }) => Ok(text(value)),
                Some(_) => Err(WRONG_TYPE.to_owned()),
            },
            (Some(b"SET"), 4) if &*words[3] == b"KEEPTTL" => {
                let until_ms = self.get(&key()?).and_then(|entry| entry.until_ms);
                self.keys.insert(key()?, Entry { value: Stored::Text(words[2].clone()), until_ms });
                Ok(Reply::Done)
            }
            (Some(b"PSETEX"), 4) => {
                let time = number(2)?;
                if time <= 0 {
                    return Err("ERR invalid expire time in 'psetex' command".to_owned());
                }
                let until_ms = Some(now_ms + time.unsigned_abs());
                self.keys.insert(key()?, Entry { value: Stored::Text(words[3].clone()), until_ms });
                Ok(Reply::Done)
            }
            (Some(b"DEL"), 2) => {
                let key = key()?;
                let is_there = self.get(&key).is_some();
                self.keys.remove(&key);
                Ok(Reply::Integer(is_there.into()))
            }
            (Some(b"PEXPIRE"), 3) => {
                let (key, time) = (key()?, number(2)?);
                if time <= 0 {
                    return Ok(Reply::Integer(self.keys.remove(&key).is_some().into()));
                }
                let Some(entry) = self.get(&key) else { return Ok(Reply::Integer(0)) };
                entry.until_ms = Some(now_ms + time.unsigned_abs());
                Ok(Reply::Integer(1))
            }
            (Some(b"LLEN"), 2) => {
                Ok(Reply::Integer(self.list(&key()?)?.map_or(0, |list| i64::try_from(list.len()).unwrap_or(0))))
            }
            (Some(b"LRANGE"), 4) => {
                let (first, last) = (number(2)?, number(3)?);
                let Some(list) = self.list(&key()?)? else { return Ok(Reply::List(Vec::new())) };
                let range = bounds(list.len(), first, last);
                Ok(Reply::List(list.range(range).cloned().collect()))
            }
            (Some(b"LINDEX"), 3) => {
                let at = number(2)?;
                let Some(list) = self.list(&key()?)? else { return Ok(Reply::Nil) };
                Ok(index(list.len(), at).map_or(Reply::Nil, |at| text(&list[at])))
            }
            (Some(b"LSET"), 4) => {
                let at = number(2)?;
                let Some(list) = self.list(&key()?)? else { return Err("ERR no such key".to_owned()) };
                let at = index(list.len(), at).ok_or("ERR index out of range")?;
                list[at] = words[3].clone();
                Ok(Reply::Done)
            }
            (Some(b"LTRIM"), 4) => {
                let (key, first, last) = (key()?, number(2)?, number(3)?);
                if let Some(list) = self.list(&key)? {
                    let range = bounds(list.len(), first, last);
                    *list = list.range(range).cloned().collect();
                }
                self.remove_if_empty(&key);
                Ok(Reply::Done)
            }
            (Some(b"RPUSH"), 3..) => {
                let key = key()?;
                if self.get(&key).is_none() {
                    self.keys.insert(key.clone(), Entry { value: Stored::List(VecDeque::new()), until_ms: None });
                }
                let Some(list) = self.list(&key)? else { return Ok(Reply::Nil) };
                list.extend(words[2..].iter().cloned());
                Ok(Reply::Integer(i64::try_from(list.len()).unwrap_or(0)))
            }
            (Some(b"RPOP"), 2) => {
                let key = key()?;
                let popped = self.list(&key)?.and_then(VecDeque::pop_back);
                self.remove_if_empty(&key);
                Ok(popped.map_or(Reply::Nil, Reply::Text))
            }
            (name, _) => Err(format!("ERR the simulated server has no such command: {name:?}")),
        }
    }
}

/// Returns the range of a list's elements from one index to another, counted from the end if below 0.
fn bounds(length: usize, first: i64, last: i64) -> std::ops::Range<usize> {
    let whole = |at: i64| if at < 0 { (length as i64 + at).max(-1) } else { at };
    let (first, end) = (whole(first).max(0) as usize, (whole(last) + 1).max(0) as usize);
    let end = end.min(length);
    first.min(end)..end
}

fn index(length: usize, at: i64) -> Option<usize> {
    let at = if at < 0 { length as i64 + at } else { at };
    usize::try_from(at).ok().filter(|at| *at < length)
}

thread_local! {
    static INTERPRETER: Interpreter = Interpreter::new();
    /// The data of the server whose script runs.
    static DATA: RefCell<Option<Server>> = const { RefCell::new(None) };
}

struct Interpreter {
    lua: Lua,
    /// The compiled scripts with their texts, by their names.
    scripts: RefCell<HashMap<String, (String, Function)>>,
}

/// Errors of `redis.call` are raised, those of `redis.pcall` are returned.
const CALL: &str = "
    local pcall_ = redis.pcall
    function redis.call(...)
        local reply = pcall_(...)
        if type(reply) == 'table' and reply.err then error(reply, 0) end
        return reply
    end";

impl Interpreter {
    fn new() -> Self {
        let lua = Lua::new();
        let made = || -> mlua::Result<()> {
            let (redis, structs) = (lua.create_table()?, lua.create_table()?);
            redis.set("pcall", lua.create_function(|lua, words: MultiValue| command(lua, &words))?)?;
            structs.set("pack", lua.create_function(|lua, values: MultiValue| pack(lua, &values))?)?;
            structs.set(
                "unpack",
                lua.create_function(|lua, (format, text, from): (mlua::String, mlua::String, Option<usize>)| {
                    unpack(lua, &format.as_bytes(), &text.as_bytes(), from.unwrap_or(1))
                })?,
            )?;
            lua.globals().set("redis", redis)?;
            lua.globals().set("struct", structs)?;
            lua.load(CALL).exec()
        };
        made().expect("the interpreter has these functions");
        Self { lua, scripts: RefCell::default() }
    }

    /// Compiles a script, unless it is compiled. Returns its name.
    fn compile(&self, text: &str) -> String {
        let mut scripts = self.scripts.borrow_mut();
        if let Some((name, _)) = scripts.iter().find(|(_, (known, _))| known == text) {
            return name.clone();
        }
        let name = sha1_smol::Sha1::from(text.as_bytes()).digest().to_string();
        let function = self.lua.load(text).into_function().expect("the script compiles");
        scripts.insert(name.clone(), (text.to_owned(), function));
        name
    }

    fn run(&self, name: &str, keys: &[Bytes], args: &[Bytes]) -> Reply {
        let scripts = self.scripts.borrow();
        let run = || -> mlua::Result<Value> {
            let table = |texts: &[Bytes]| -> mlua::Result<Table> {
                let texts = texts.iter().map(|text| self.lua.create_string(text)).collect::<mlua::Result<Vec<_>>>()?;
                self.lua.create_sequence_from(texts)
            };
            self.lua.globals().set("KEYS", table(keys)?)?;
            self.lua.globals().set("ARGV", table(args)?)?;
            scripts[name].1.call(())
        };
        match run() {
            Ok(Value::String(text)) => Reply::Text(Bytes::copy_from_slice(&text.as_bytes())),
            Ok(Value::Number(number)) => Reply::Integer(number as i64),
            Ok(Value::Integer(number)) => Reply::Integer(number),
            Ok(_) => Reply::Nil,
            Err(error) => Reply::Error(format!("ERR user_script: {error}")),
        }
    }
}

fn command(lua: &Lua, words: &MultiValue) -> mlua::Result<Value> {
    let words = words.iter().map(|word| match word {
        Value::String(text) => Ok(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Integer(number) => Ok(number.to_string().into()),
        Value::Number(number) => Ok(format!("{number:.0}").into()),
        other => Err(mlua::Error::runtime(format!("{other:?} is no argument of a command"))),
    });
    let words = words.collect::<mlua::Result<Vec<Bytes>>>()?;
    let reply = DATA.with_borrow_mut(|data| data.as_mut().expect("a script runs").command(&words));
    Ok(match reply.unwrap_or_else(Reply::Error) {
        Reply::Nil => Value::Boolean(false),
        Reply::Integer(number) => Value::Number(number as f64),
        Reply::Text(text) => Value::String(lua.create_string(&text)?),
        Reply::List(texts) => {
            let texts = texts.iter().map(|text| lua.create_string(text)).collect::<mlua::Result<Vec<_>>>()?;
            Value::Table(lua.create_sequence_from(texts)?)
        }
        Reply::Done => {
            let table = lua.create_table()?;
            table.set("ok", "OK")?;
            Value::Table(table)
        }
        Reply::Error(words) => {
            let table = lua.create_table()?;
            table.set("err", words)?;
            Value::Table(table)
        }
    })
}

/// A part of a format of `struct`.
enum Part {
    Double,
    /// An unsigned number of this many bytes.
    Whole(usize),
    /// A text of this many bytes. 0 is the number before it.
    Text(usize),
}

/// Reads a format. All are little-endian, without alignment.
fn parts(format: &[u8]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut rest = format;
    while let Some((letter, after)) = rest.split_first() {
        let digits = after.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = std::str::from_utf8(&after[..digits]).ok().and_then(|digits| digits.parse().ok());
        rest = &after[digits..];
        match letter {
            b'<' => {}
            b'd' => parts.push(Part::Double),
            b'B' => parts.push(Part::Whole(1)),
            b'I' => parts.push(Part::Whole(number.unwrap_or(4))),
            b'c' => parts.push(Part::Text(number.unwrap_or(1))),
            other => panic!("the simulated server has no format {}", other.escape_ascii()),
        }
    }
    parts
}

fn pack(lua: &Lua, values: &MultiValue) -> mlua::Result<mlua::String> {
    let mut values = values.iter();
    let Some(Value::String(format)) = values.next() else { return Err(mlua::Error::runtime("no format")) };
    let mut packed = Vec::new();
    for part in parts(&format.as_bytes()) {
        let value = values.next();
        let number = match value {
            Some(Value::Number(number)) => Some(*number),
            Some(Value::Integer(number)) => Some(*number as f64),
            _ => None,
        };
        match (part, number, value) {
            (Part::Double, Some(number), _) => packed.extend(number.to_le_bytes()),
            (Part::Whole(size), Some(number), _) => {
                let bits = if number < 0.0 { (number as i64) as u64 } else { number as u64 };
                packed.extend(&bits.to_le_bytes()[..size]);
            }
            (Part::Text(0), _, Some(Value::String(text))) => packed.extend(&*text.as_bytes()),
            (Part::Text(size), _, Some(Value::String(text))) => {
                let text = text.as_bytes();
                let text = text.get(..size).ok_or_else(|| mlua::Error::runtime("string too short"))?;
                packed.extend(text);
            }
            _ => return Err(mlua::Error::runtime(format!("{value:?} cannot be packed"))),
        }
    }
    lua.create_string(packed)
}

fn unpack(lua: &Lua, format: &[u8], text: &[u8], from: usize) -> mlua::Result<MultiValue> {
    let mut rest = text.get(from - 1..).unwrap_or_default();
    let mut values = Vec::new();
    for part in parts(format) {
        let size = match part {
            Part::Double => 8,
            Part::Whole(size) => size,
            Part::Text(0) => match values.pop() {
                Some(Value::Number(size)) => size as usize,
                _ => return Err(mlua::Error::runtime("format 'c0' needs a size before it")),
            },
            Part::Text(size) => size,
        };
        let (own, after) = rest.split_at_checked(size).ok_or_else(|| mlua::Error::runtime("data string too short"))?;
        rest = after;
        let mut bytes = [0; 8];
        values.push(match part {
            Part::Text(_) => Value::String(lua.create_string(own)?),
            Part::Double => Value::Number(f64::from_le_bytes(own.try_into().expect("it has eight bytes"))),
            Part::Whole(size) => {
                bytes[..size].copy_from_slice(own);
                Value::Number(u64::from_le_bytes(bytes) as f64)
            }
        });
    }
    values.push(Value::Number((text.len() - rest.len() + 1) as f64));
    Ok(MultiValue::from_iter(values))
}
