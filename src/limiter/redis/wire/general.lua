-- Requests of every kind: the usual case and all others. It stands in `make_general` behind the
-- twins, convert.lua and refund.lua, and is made only when a request needs it.

local DECIDE = {gcra, gcra, step_bucket, fixed_window, sliding_window, trail, trail, block, meter}
local MOST = 9007199254740992 -- a larger number is garbled
local FOREIGN = '\3'
local parsed = {}

-- The form at a place of the program, as fields.
local function form_of(place)
  local q = parsed[place]
  if q then return q end
  local f = {unpack(FORM, program, place)}
  q = {
    kind = f[1], layout = f[2], head = f[3], size = f[4], mode = f[5], extra = f[16], entry = f[2], after = f[17],
    share = string.byte(f[16]) == 1,
  }
  for number = 1, 10 do q[number] = f[number + 5] end
  if is_list(q.kind) then
    q.cost, q.bound, q.limit, q.most, q.period, q.grain = q[1], q[2], q[3], q[4], q[5], q[6]
    q.oldest, q.log, q.count_denied, q.life = q[7], q[8], q[9], q[10]
  end
  q.first, q.last = unpack('<I2I2', q.extra, 2)
  parsed[place] = q
  return q
end

-- Reads a key: its text, or the first entry of its list and the list.
local function read(key, kind)
  for try_list = 0, 1 do
    local value
    if is_list(kind) == (try_list == 0) then value = try('LRANGE', key, 0, 3) else value = try('GET', key) end
    if not value then return nil end
    if type(value) ~= 'table' then return value end
    if not value.err then return value[1], value end
    if not string.find(value.err, 'WRONGTYPE', 1, true) then error(value, 0) end
  end
  error(FOREIGN, 0)
end

-- Returns a key's state under this form: a list's entries in `x`, or the numbers of any other.
local function look(key, q)
  local text, list = read(key, q.kind)
  local y = {key = key, q = q, at = 0, n = 0, m = 0, there = false}
  if is_list(q.kind) and (not text or list and text == q.head) then
    local garbled
    y.x, garbled = trail_load(key, list or {}, q)
    y.x.fresh = garbled
  elseif not is_list(q.kind) and not text then
    return y
  elseif not list and #text == q.size and string.sub(text, 1, #q.head) == q.head then
    local _, at, n, m = unpack(q.layout, text)
    -- A garbled state counts as none.
    if at >= 0 and at < MOST and n >= 0 and n < MOST then y.at, y.n, y.m, y.there = at, n, m, true end
  else
    -- Another quota wrote it. It is read as a state of this one, and stays as it is until something
    -- is taken.
    local found, at, n, m = taken_over(key, q, text, list)
    if found == nil then error(FOREIGN, 0) end
    if not found then
      if is_list(q.kind) then
        y.x = trail_load(key, {}, q)
        y.x.fresh = true
      end
    else
      y.ahead, y.x = found.ahead, found.x
      if not y.x and at and at >= 0 then y.at, y.n, y.m, y.there = at, n or 0, m or 0, true end
    end
  end
  return y
end

-- Decides a charge, and sets what is answered and what would be written. Returns whether it refuses
-- the request.
local function decided(y)
  local q, ok = y.q
  if y.x then
    ok = trail(y.x, q)
    if y.ahead and q.cost > 0 then y.x.writes = true end
    y.told, y.writes = y.x.told, y.x.writes
  else
    y.told = y.there and pack('<B', 1) .. pack(STATES[q.kind], y.at, y.n, y.m) or '\0'
    local cost = q[1]
    if q.mode > 2 and not y.hit then
      -- No partner was refused, so the charge only looks. A closed block that counts denied
      -- requests counts it all the same.
      cost = 0
      if q.kind == 8 and q[9] == 1 and block_view(now, y.at, y.n, y.m, q[3], q[4], q[8]) == 2 then cost = q[1] end
    end
    ok, y.to, y.p, y.r = DECIDE[q.kind](now, y.at, y.n, y.m, cost, q[2], q[3], q[4], q[5], q[6], q[7], q[8], q[9])
    if y.ahead and not y.to and (cost > 0 or q.kind == 2 and q[5] > 0) then
      -- It lies further ahead than this quota can put it, and would stay there.
      y.to, y.p, y.r = y.there and y.at or -1, y.n, y.m
    end
    y.writes = y.to ~= nil
  end
  y.denied = not ok
  y.outlives = q.mode == 1 and not ok or q.mode == 5
  return not ok and (q.mode == 1 or q.mode > 3)
end

local function write_pair(key, q, to, p, m)
  if not to or to < 0 then
    redis.call('DEL', key)
    return
  end
  local left = math.max(to - now, 0) -- a refund can leave a state that is over
  redis.call('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(q.layout, q.head, to, p or 0, m or 0))
end

local function write(y)
  if y.x then
    trail_store(y.x, y.q, y.q.head)
  else
    write_pair(y.key, y.q, y.to, y.p, y.r)
  end
end

-- Returns how the charge of a list stands with nothing taken.
local function standing(y)
  local x = look(y.key, y.q).x
  trail(x, setmetatable({cost = 0, bound = 2 ^ 62}, {__index = y.q}))
  return x.told
end

-- Decides the charges of a request, and writes them if all are allowed and it is no peek.
local function charge(key, forms, is_peek)
  local states, answers, refused, denied = {}, {}, false, {[0] = true}
  for at = 1, #forms do states[at] = look(KEYS[key + at], forms[at]) end
  for at, y in ipairs(states) do
    for partner = y.q.first, y.q.last do
      if denied[partner] then y.hit = true end
    end
    if decided(y) then refused = true end
    denied[at] = y.denied
  end
  for at, y in ipairs(states) do
    if y.x and refused and not y.denied then y.told = standing(y) end
    answers[at] = y.told
  end
  for _, y in ipairs(states) do
    if y.writes and not is_peek and (not refused or y.outlives) then write(y) end
  end
  return table.concat(answers)
end

-- Refunds what a receipt holds, if the state still has it.
local function refund(key, q)
  local units, num, receipt_at, receipt_n = unpack('<dddd', q.extra, 2)
  local receipt = {units = units, num = num, at = receipt_at, n = receipt_n}
  local y = look(key, q)
  local x = y.x
  if x and x.fresh then
    refund_converted(x, q, receipt)
  elseif x then
    if x.newest and refund_list(key, q, receipt) and x.rehead then redis.call('LSET', key, 0, q.head) end
  elseif y.there then
    local to, p, m = refund_pair(q, receipt, y.at, y.n, y.m)
    if to then write_pair(key, q, to, p, m) end
  end
end

-- Does a request. Returns its answer, and the place behind its forms.
return function(verb, key, width, place)
  local forms = {}
  if verb < 4 then
    for number = 1, width do
      forms[number] = form_of(place)
      place = forms[number].after
    end
  end
  local done, answer = pcall(function()
    if verb < 3 then return charge(key, forms, verb == 2) end
    if verb == 3 then refund(KEYS[key + 1], forms[1]) else redis.call('DEL', KEYS[key + 1]) end
    return '\5'
  end)
  if done or answer == FOREIGN then return answer, place end
  local text = string.sub(type(answer) == 'table' and answer.err or tostring(answer), 1, 1000)
  return pack('<BI2c0', 4, #text, text), place
end
