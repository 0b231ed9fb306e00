-- Requests of every kind: charges that depend on each other, sets with lists, peeks, refunds,
-- resets, and values that another quota wrote. It stands in `make_requests`, which is called when a
-- request needs it.
--
-- The fields of `y`, a state that is looked at:
--   key, form (the form's fields, in their order), kind;
--   told: the answer;
--   at, n, m: the state, unless it is a list;
--   list, newest, units, total, whole: the state, if it is a list (see entry_log.lua);
--   converted, ahead: another quota wrote it, and even a denied charge has to write it.

local FOREIGN = '\3'
local twins, convert, refund = {}, nil, nil

local function is_list(kind) return kind == 6 or kind == 7 end

-- Reads a key: its text, or the first element of its list and the list.
local function read(key, kind)
  for try_list = 0, 1 do
    local value
    if is_list(kind) == (try_list == 0) then value = try('LRANGE', key, '0', '2') else value = try('GET', key) end
    if type(value) ~= 'table' then return value end
    if not value.err then return value[1], value end
    if not string.find(value.err, 'WRONGTYPE', 1, true) then error(value, 0) end
  end
  error(FOREIGN, 0)
end

-- Returns a key's state under this form.
local function look(key, form)
  local kind, layout, head, size = form[1], form[2], form[3], form[4]
  local y = {key = key, form = form, kind = kind, at = 0, n = 0, m = 0, total = 0}
  if is_list(kind) then
    y.list, y.newest, y.units, y.total = read_list(try, unpack, key, layout, head, size)
    if y.list then return y end
  else
    y.told, y.at, y.n, y.m = read_pair(try, unpack, key, layout, head, size)
    if y.told then return y end
  end
  local text, list = read(key, kind)
  local is_own = list and text == head or not list and #text == size and string.sub(text, 1, #head) == head
  if not is_own then
    -- Another quota wrote it. It is read as a state of this one, and stays as it is until something
    -- is taken.
    convert = convert or make_convert()
    y.converted = true
    if convert(y, text, list) == nil then error(FOREIGN, 0) end
  end
  -- A garbled state counts as none.
  if is_list(kind) and not y.list then y.list, y.total, y.whole = {head}, 0, {head} end
  if not y.told then y.told, y.at, y.n, y.m = '\0', 0, 0, 0 end
  return y
end

local function twin_of(kind)
  local t = twins[kind]
  if not t then
    t = {twin(kind)}
    twins[kind] = t
  end
  return t
end

-- Decides a charge of a list. Sets what is answered, and `edit` if something is to be written.
local function decide_list(y, cost, bound)
  local f, key = y.form, y.key
  if y.whole then key = nil end
  local ok, told, writes, gone, cut, newest, units, counted, joins, whole = twin_of(6)[1](
    try, pack, unpack, now, key, y.list, y.newest, y.units, y.total, f[2], f[4],
    cost, bound, f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15]
  )
  y.told, y.edit = told, nil
  if writes or y.ahead and cost > 0 then y.edit = {gone, cut, newest, units, counted, joins, whole or y.whole} end
  return ok
end

-- Decides a charge. `hit` says that one of the charges that it belongs to is refused. Sets `to`,
-- `p` and `q` if they are to be written.
local function decide(y, hit)
  local f, kind = y.form, y.kind
  if is_list(kind) then return decide_list(y, f[6], f[7]) end
  local cost, t = f[6], twin_of(kind)
  if f[5] > 2 and not hit then
    -- No partner was refused, so the charge only looks. A closed block that counts denied requests
    -- counts it all the same.
    cost = 0
    if kind == 8 and f[14] == 1 and t[2](now, y.at, y.n, y.m, f[8], f[9], f[13]) == 2 then cost = f[6] end
  end
  local ok
  ok, y.to, y.p, y.q = t[1](now, y.at, y.n, y.m, cost, f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14])
  if y.ahead and not y.to and (cost > 0 or kind == 2 and f[10] > 0) then
    -- It lies further ahead than this quota can put it, and would stay there.
    y.to, y.p, y.q = y.told ~= '\0' and y.at or -1, y.n, y.m
  end
  return ok
end

local function write_state(y, to, p, q)
  local at = not y.converted and y.at or -1
  local failed = write_pair(try, pack, now, longer, y.key, y.form[2], y.form[3], at, to, p or 0, q or 0)
  if failed then error(failed, 0) end
end

local function write_list(y, gone, cut, newest, units, counted, joins, whole)
  local f = y.form
  twin_of(6)[2](
    try, pack, unpack, now, longer, y.key, y.list, f[2], f[3], f[4], f[15],
    gone, cut, newest, units, counted, joins, whole
  )
end

-- Decides the charges of a request, and writes them if all are allowed and it is no peek.
local function take(first, set, is_peek)
  local states, answers, refused, denied = {}, {}, false, {[0] = true}
  for number, form in ipairs(set) do
    local y, mode, hit = look(KEYS[first + number], form), form[5], false
    if mode > 2 then
      local from, to = unpack('<I2I2', form[16], 2)
      for partner = from, to do hit = hit or denied[partner] end
    end
    local ok = decide(y, hit)
    if not ok and (mode == 1 or mode > 3) then refused = true end
    denied[number], y.outlives = not ok, mode == 1 and not ok or mode == 5
    states[number], answers[number] = y, y.told
  end
  for number, y in ipairs(states) do
    if y.list and refused and not denied[number] then
      decide_list(y, 0, 2 ^ 62) -- how it stands with nothing taken
      answers[number] = y.told
    end
  end
  for _, y in ipairs(states) do
    if not is_peek and (not refused or y.outlives) then
      if y.edit then
        write_list(y, _G.unpack(y.edit, 1, 7))
      elseif y.to then
        write_state(y, y.to, y.p, y.q)
      end
    end
  end
  return table.concat(answers)
end

-- Does a request. Returns its answer, and the place behind its forms.
return function(verb, first, width, place)
  local set = {}
  if verb < 4 then
    for number = 1, width do
      set[number] = {unpack(FORM, program, place)}
      place = set[number][17]
    end
  end
  local done, answer = pcall(function()
    if verb < 3 then return take(first, set, verb == 2) end
    if verb == 4 then
      redis.call('DEL', KEYS[first + 1])
    else
      refund = refund or make_refund(write_state, write_list)
      refund(look(KEYS[first + 1], set[1]))
    end
    return '\5'
  end)
  if done or answer == FOREIGN then return answer, place end
  local text = string.sub(type(answer) == 'table' and answer.err or tostring(answer), 1, 1000)
  return pack('<BI2c0', 4, #text, text), place
end
