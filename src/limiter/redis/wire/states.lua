-- The states of charges of any kind: their forms, and how they are read, decided and written. Before it stand FOUND, the twins
-- as DECIDE, and `taken_over` and the like, or nil in their place.

-- Of values that hold several states, see `packed.lua`.
local look_packed, decided_packed, write_charges, change_packed

local parsed = {}

local NUMBERS = {4, 7, 6, 7, 7, 10, 10, 0, 9, 4}

-- Of one charge, from a place on: the mode and the numbers; then the next place.
local function charge_of(text, place, kind, head)
  local q = {unpack('<B' .. string.rep('d', NUMBERS[kind]), text, place)}
  q.kind, q.head, q.mode, place = kind, head, q[1], q[#q]
  q[#q] = nil
  table.remove(q, 1)
  if is_list(kind) then
    q.cost, q.bound, q.limit, q.most, q.period, q.grain = q[1], q[2], q[3], q[4], q[5], q[6]
    q.oldest, q.log, q.count_denied, q.life = q[7], q[8], q[9], q[10]
  end
  return q, place
end

local function form_of(number)
  local q = parsed[number]
  if q then return q end
  local text = ARGV[number]
  local kind, layout, head, size, place = unpack('<BI2c0I2c0I2', text)
  local share = kind > 127
  if share then kind = kind - 128 end
  if kind ~= 8 then
    q, place = charge_of(text, place, kind, head)
    q.entry = layout
    if q.mode == 3 or q.mode == 4 then
      local units, num, at, n = unpack('<dddd', text, place)
      q.refund = {units = units, num = num, at = at, n = n}
    elseif q.mode > 5 then
      -- The places of the charges that it belongs to.
      local count
      count, place = unpack('<B', text, place)
      q.partners = {unpack('<' .. string.rep('I2', count), text, place)}
      q.partners[count + 1] = nil
    end
  else
    q = {kind = kind, charges = {}}
    local from = 3
    for at = 1, string.byte(head, 2) do
      local own, length = quota_of(string.sub(head, from))
      q.charges[at], place = charge_of(text, place, own.kind, string.sub(head, from, from + length - 2))
      from = from + length - 1
    end
  end
  q.layout, q.head, q.size, q.share = layout, head, size, share
  parsed[number] = q
  return q
end

local MOST = 9007199254740992
local AGAIN, FOREIGN = '\3', '\4'

-- Reads a key: a text, or the first of a list; then why not.
local function read(key, kind)
  for try_list = 0, 1 do
    local as_list = is_list(kind) == (try_list == 0)
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
    if not taken_over then return nil, nil, AGAIN end
  end
  return nil, nil, FOREIGN
end

-- What a key's state is under this form: a table, or nothing and why not.
local function look(key, q)
  if q.charges then return look_packed(key, q) end
  local text, list, why = read(key, q.kind)
  if why then return nil, why end
  local y = {key = key, q = q, at = 0, there = false}
  if is_list(q.kind) then
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
  if not taken_over then
    local kind = string.byte(text, 1) or 0
    return nil, kind > 144 and kind < 155 and kind ~= 152 and AGAIN or FOREIGN
  end
  -- What another quota wrote: it is read as one of this, and stays as it is until something is taken.
  local found, at, n, m = taken_over(key, q, text, list)
  if found == nil then return nil, FOREIGN end
  y.converted = true
  if not found then
    if is_list(q.kind) then
      y.x = trail_load(key, {}, q)
      y.x.fresh = true
    end
    return y
  end
  y.ahead = found.ahead
  if found.x then
    y.x = found.x
  elseif at and at >= 0 then
    y.at, y.n, y.m, y.there = at, n, m, true
  end
  return y
end

-- Decides; whether it is refused is returned.
local function decided(y)
  local q = y.q
  local ok
  if q.charges then return decided_packed(y) end
  if y.x then
    ok = DECIDE[q.kind](y.x, q)
    if y.ahead and q.cost > 0 then y.x.writes = true end
    y.told, y.writes = y.x.told, y.x.writes
  else
    y.told = '\0'
    if y.there then y.told = pack(FOUND[q.kind], 1, y.at, y.n, y.m) end
    if q.mode == 0 then return false end
    local cost, force = q[1], q[2]
    if q.mode > 5 and not y.hit then
      -- Nothing that it belongs to was refused: it looks, unless it counts what it denies itself.
      cost = 0
      if q.kind == 9 then
        local phase = block_view(now, y.at, y.n or 0, y.m or 0, q[3], q[4], q[8])
        if phase == 2 and q[9] == 1 then cost = q[1] end
      end
    end
    ok, y.to, y.p, y.q2 = DECIDE[q.kind](now, y.at, y.n, y.m, cost, force, q[3], q[4], q[5], q[6], q[7], q[8], q[9])
    if y.ahead and not y.to and (cost > 0 or q.kind == 2 and q[5] > 0) then
      -- It lies further ahead than this quota can put it, and would stay there.
      y.to, y.p, y.q2 = y.there and y.at or -1, y.n, y.m
    end
    y.writes = y.to ~= nil
  end
  y.denied = not ok
  y.refused = q.mode == 1 and not ok or q.mode == 8
  return not ok and (q.mode == 1 or q.mode > 6)
end

local function write_pair(key, q, to, p, m)
  if not to or to < 0 then
    redis.call('DEL', key)
    return
  end
  local left = math.max(to - now, 0) -- what is left after a refund may be over
  redis.call('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(q.layout, q.head, to, p or 0, m or 0))
end

-- Writes what was decided, if it is to be.
local function write(y, taken)
  local q = y.q
  if q.charges then return write_charges(y, taken) end
  if q.mode == 0 or not y.writes or not (taken or y.refused) then return end
  if y.x then
    trail_store(y.x, q, q.head)
  else
    write_pair(y.key, q, y.to, y.p, y.q2)
  end
end
