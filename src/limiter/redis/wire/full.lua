-- The driver of charges of any kind, and of refunds and resets. Before it stand FORMS, FOUND, the twins as DECIDE, and `used_of_value`
-- and the like, or nil in their place.
--
-- KEYS, ARGV and the reply as in `lean.lua`; the first number of a form says which kind it is. In the list a run with a form
-- of 65535 is of keys to be forgotten.

local parsed = {}

local function form_of(number)
  local q = parsed[number]
  if q then return q end
  local text = ARGV[number]
  local kind = string.byte(text, 1)
  q = {unpack(FORMS[kind], text)}
  q.kind, q.layout, q.head, q.size, q.mode = kind, q[1], q[2], q[3], q[4]
  local place = #q
  local rest = q[place]
  q[place] = nil
  for at = 5, place - 1 do q[at - 4] = q[at] end
  for at = place - 4, place - 1 do q[at] = nil end
  if kind >= 6 then
    q.entry = q.layout
    q.cost, q.bound, q.limit, q.most, q.period, q.grain = q[1], q[2], q[3], q[4], q[5], q[6]
    q.oldest, q.log, q.count_denied, q.life = q[7], q[8], q[9], q[10]
  end
  if q.mode == 3 then
    local units, num, at, n = unpack('<dddd', text, rest)
    q.refund = {units = units, num = num, at = at, n = n}
  end
  parsed[number] = q
  return q
end

local MOST = 9007199254740992
local AGAIN, FOREIGN = '\3', '\4'

-- Reads a key: a text, or the first of a list; then why not.
local function read(key, kind)
  for try_list = 0, 1 do
    local as_list = (kind >= 6) == (try_list == 0)
    local value
    if as_list then value = try('LRANGE', key, 0, 3) else value = try('GET', key) end
    if type(value) ~= 'table' or not value.err then
      if as_list then
        if #value == 0 then return nil end
        return value[1], value
      end
      return value or nil
    end
    if not string.find(value.err, 'WRONGTYPE', 1, true) then error(value, 0) end
    if not used_of_value then return nil, nil, AGAIN end
  end
  return nil, nil, FOREIGN
end

-- What a key's state is under this form: a table, or nothing and why not.
local function look(key, q)
  local text, list, why = read(key, q.kind)
  if why then return nil, why end
  local y = {key = key, q = q, at = 0, there = false}
  if q.kind >= 6 then
    if not text or (list and text == q.head) then
      local garbled
      y.x, garbled = trail_load(key, list or {}, q)
      y.x.fresh = garbled
      return y
    end
  elseif not text then
    return y
  elseif not list and #text == q.size then
    local head, at, n, m = unpack(q.layout, text)
    if head == q.head then
      -- What is garbled is as nothing.
      if at >= 0 and at < MOST and (not n or n >= 0 and n < MOST) then y.at, y.n, y.m, y.there = at, n, m, true end
      return y
    end
  end
  if not used_of_value then
    local kind = string.byte(text, 1) or 0
    return nil, kind > 144 and kind < 152 and AGAIN or FOREIGN
  end
  local parts, of = used_of_value(key, text, list)
  if parts == nil then return nil, FOREIGN end
  y.converted = true
  local at, n, m
  if parts then at, n, m = with_used((quota_of(q.head)), parts, of) end
  if q.kind < 6 then
    if at then y.at, y.n, y.m, y.there = at, n, m, true end
    return y
  end
  y.x = trail_load(key, {}, q)
  y.x.key = key
  y.x.fresh = true
  if at then
    local x = y.x
    x.starts[1], x.units[1], x.have, x.total = at, n, 1, n
    x.newest, x.newest_units, x.last = at, n, at
  end
  return y
end

-- Decides; whether it is refused is returned.
local function decided(y)
  local q = y.q
  local ok
  if y.x then
    ok = DECIDE[q.kind](y.x, q)
    y.told, y.writes = y.x.told, y.x.writes
  else
    y.told = '\0'
    if y.there then y.told = pack(FOUND[q.kind], 1, y.at, y.n, y.m) end
    if q.mode == 0 then return false end
    ok, y.to, y.p, y.q2 = DECIDE[q.kind](now, y.at, y.n, y.m, q[1], q[2], q[3], q[4], q[5], q[6], q[7])
    y.writes = y.to ~= nil
  end
  y.refused = q.mode == 1 and not ok
  return y.refused
end

local function write_pair(key, q, to, p, m)
  if not to or to < 0 then
    redis.call('DEL', key)
    return
  end
  local left = math.max(to - now, 0) -- what is left after a refund may be over
  redis.call('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(q.layout, q.head, to, p or 0, m or 0))
end

-- Writes: what was decided, if it is to be, and else what was converted.
local function write(y, taken)
  local q = y.q
  if q.mode == 0 then return end
  if y.x then
    if y.writes and (taken or y.refused) then
      trail_store(y.x, q, q.head)
    elseif y.converted then
      local x = y.x
      x.add, x.drop, x.cut, x.cut_at, x.gone = 0, 0, 0, 0, 0
      x.newest = x.last
      trail_store(x, q, q.head)
    end
  elseif y.writes and (taken or y.refused) then
    write_pair(y.key, q, y.to, y.p, y.q2)
  elseif y.converted then
    write_pair(y.key, q, y.there and y.at, y.n, y.m)
  end
end

-- A lone charge, if its state is as it should be; else nothing is done, and nothing answered.
local function plain(key, q)
  if q.mode == 3 then return nil end
  if q.kind >= 6 then
    if (q.most + 1) * q.grain >= MOST then return nil end
    return trail_plain(key, q.layout, q.head, q.size, q.mode, q[1], q[2], q[3], q[4], q[5], q[6], q[7], q[8], q[9], q[10])
  end
  local value, at, n, m = try('GET', key), 0
  if value then
    if #value ~= q.size then return nil end
    local head
    head, at, n, m = unpack(q.layout, value)
    if head ~= q.head or not (at >= 0 and at < MOST and (not n or n >= 0 and n < MOST)) then return nil end
  end
  if q.mode > 0 then
    local _, to, p, r = DECIDE[q.kind](now, at, n, m, q[1], q[2], q[3], q[4], q[5], q[6], q[7])
    if to and to < 0 then
      try('DEL', key)
    elseif to then
      local left = to - now
      local done = try('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(q.layout, q.head, to, p, r))
      if done.err then return pack('<BI2c0', 5, #done.err, done.err) end
    end
  end
  return value and pack(FOUND[q.kind], 1, at, n, m) or '\0'
end

-- A request of the keys from `from` on, with these forms.
local function request(from, numbers)
  local states, allowed = {}, true
  for at = 1, #numbers do
    local y, why = look(KEYS[from + at], form_of(numbers[at]))
    if not y then return why end
    states[at] = y
  end
  for at = 1, #states do
    if decided(states[at]) then allowed = false end
  end
  local told = {}
  for at = 1, #states do
    write(states[at], allowed)
    told[at] = states[at].told
  end
  return table.concat(told)
end

local function give_back(key, q)
  local y, why = look(key, q)
  if not y then return why end
  if y.x then
    if y.converted then
      y.x.drop = 0
      trail_store(y.x, q, q.head)
    end
    if y.x.newest then refund_list(key, q, q.refund) end
    return '\6'
  end
  local to, p, m
  if y.there then to, p, m = refund_pair(q, q.refund, y.at, y.n, y.m) end
  if to then
    write_pair(key, q, to, p, m)
  elseif y.converted then
    write_pair(key, q, y.there and y.at, y.n, y.m)
  end
  return '\6'
end

local function answer(done, told)
  if done then return told end
  local text = type(told) == 'table' and told.err or tostring(told)
  text = string.sub(text, 1, 1000)
  return pack('<BI2c0', 5, #text, text)
end

local reply, key = {pack('<d', now)}, 0
if not ARGV[3] then
  reply[2] = answer(pcall(request, 0, {1}))
else
  local list, place = ARGV[1], 1
  while place <= #list do
    local form, count
    form, count, place = unpack('<I2I2', list, place)
    if form == 65535 then
      for at = 1, count do
        local done, told = pcall(redis.call, 'DEL', KEYS[key + at])
        reply[#reply + 1] = answer(done, done and '\6' or told)
      end
    elseif form > 0 then
      local q = form_of(form)
      for at = 1, count do
        local told = plain(KEYS[key + at], q)
        if told then
          reply[#reply + 1] = told
        elseif q.mode == 3 then
          reply[#reply + 1] = answer(pcall(give_back, KEYS[key + at], q))
        else
          reply[#reply + 1] = answer(pcall(request, key + at - 1, {form}))
        end
      end
    else
      local numbers = {}
      for at = 1, count do numbers[at], place = unpack('<I2', list, place) end
      reply[#reply + 1] = answer(pcall(request, key, numbers))
    end
    key = key + count
  end
end
return table.concat(reply)
