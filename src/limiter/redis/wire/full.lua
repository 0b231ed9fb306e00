-- The driver of charges of any kind, and of refunds and resets.
--
-- KEYS, ARGV and the reply as in `lean.lua`; the first number of a form says which kind it is. In the list a run with a form
-- of 65535 is of keys to be forgotten, and a run with a form of 0 is a request of so many keys, whose forms follow.

-- A lone charge, if its state is as it should be; else nothing is done, and nothing answered.
local function plain(key, q)
  if q.charges or q.mode > 2 or q.kind > 8 then return nil end
  if is_list(q.kind) then
    if (q.most + 1) * q.grain >= MOST then return nil end
    return trail_plain(
      try, pack, unpack, now, longer, alone,
      key, q.layout, q.head, q.size, q.mode, q[1], q[2], q[3], q[4], q[5], q[6], q[7], q[8], q[9], q[10]
    )
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
    if to then
      local left, done = to - now
      if to < 0 then
        done = try('DEL', key)
      else
        done = try('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(q.layout, q.head, to, p, r))
      end
      if type(done) == 'table' and done.err then return pack('<BI2c0', 5, #done.err, done.err) end
    end
  end
  return value and pack(FOUND[q.kind], 1, at, n, m) or '\0'
end

-- How a trail stands, with nothing taken.
local function standing(key, q)
  local y = look(key, q)
  trail(y.x, setmetatable({cost = 0, bound = 2 ^ 62}, {__index = q}))
  return y.x.told
end

-- A request of the keys from `from` on, with these forms.
local function request(from, numbers)
  local states, allowed, denials = {}, true, {[0] = true}
  for at = 1, #numbers do
    local y, why = look(KEYS[from + at], form_of(numbers[at]))
    if not y then return why end
    states[at] = y
  end
  for at = 1, #states do
    local y = states[at]
    for _, partner in ipairs(y.q.partners or {}) do
      if denials[partner] then y.hit = true end
    end
    if decided(y) then allowed = false end
    for _, denied in ipairs(y.denials or {y.denied and true or false}) do denials[#denials + 1] = denied end
  end
  for at = 1, #states do
    local y = states[at]
    if y.x and not y.denied and (y.q.mode == 0 or not allowed) and #states > 1 then
      local stands = standing(KEYS[from + at], y.q)
      -- Whether a set is refused that is only looked at is found out by who asks.
      if y.q.mode == 0 then y.told = '\7' .. y.told .. stands else y.told = stands end
    end
  end
  local told = {}
  for at = 1, #states do
    write(states[at], allowed)
    told[at] = states[at].told
  end
  return table.concat(told)
end

local function give_back(key, q)
  if q.mode > 3 then return change_packed(key, q) end
  local y, why = look(key, q)
  if not y then return why end
  local x = y.x
  if x and x.fresh then
    -- Of what another quota wrote, if it is still there under this one.
    local left = 0
    for number = 1, x.have do
      local start, units = x.starts[number], x.units[number]
      if start == q.refund.at and start + q.life > now then
        left = math.min(q.refund.units, units)
        x.units[number] = units - left
      end
    end
    if left > 0 then
      while x.have > 0 and x.units[x.have] <= 0 do
        x.starts[x.have], x.units[x.have], x.have = nil, nil, x.have - 1
      end
      x.drop, x.newest = 0, x.starts[x.have]
      trail_store(x, q, q.head)
    end
    return '\6'
  elseif x then
    if x.newest and refund_list(key, q, q.refund) and x.rehead then redis.call('LSET', key, 0, q.head) end
    return '\6'
  end
  local to, p, m
  if y.there then to, p, m = refund_pair(q, q.refund, y.at, y.n, y.m) end
  if to then write_pair(key, q, to, p, m) end
  return '\6'
end

local function answer(done, told)
  if done then return told end
  local text = type(told) == 'table' and told.err or tostring(told)
  text = string.sub(text, 1, 1000)
  return pack('<BI2c0', 5, #text, text)
end

local reply, key = {pack('<d', now)}, 0
if alone then
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
        elseif q.mode and q.mode > 2 and q.mode < 6 then
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
