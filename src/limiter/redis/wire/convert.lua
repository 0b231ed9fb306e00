-- What was written under another quota: how much of it is in use, and a state of the asked quota in which as much is.

-- A quota out of what its values begin with, see `form.rs`, and how long that is; nothing if it is none of ours.
local function quota_of(text)
  local kind, place, ok = (string.byte(text, 1) or 0) - 144, 2, true
  local function number()
    local value, scale = 0, 1
    while true do
      local part = string.byte(text, place)
      if not part or scale > 2 ^ 49 then
        ok = false
        return 1
      end
      place = place + 1
      value = value + (part % 128) * scale
      if part < 128 then return value end
      scale = scale * 128
    end
  end
  if kind < 1 or kind > 10 or kind == 8 then return nil end
  local q = {kind = kind, buckets = 1, epoch = 0, oldest = 0, log = 0, cost = 0, bound = 0, count_denied = 0}
  if kind == 3 or kind == 4 then q.epoch = number() end
  if kind == 9 then q.memory, q.length = number(), number() end
  if kind >= 5 and kind <= 7 then
    q.oldest = number()
    if q.oldest > 2 then q.oldest, q.log = 1, 1 end
  end
  q.limit, q.period = number(), number()
  if kind <= 3 then q.burst = number() end
  q.debt = number()
  if is_list(kind) then q.buckets = number() end
  local units = 1000000000000000
  if not ok or q.period < 1 or q.period > 31622400000000 or q.limit > units or q.debt > units or (q.burst or 0) > units then
    return nil
  end
  q.grain = q.log == 1 and 1 or q.period / q.buckets
  q.life = q.oldest == 1 and q.period or q.period + q.grain
  q.most = (q.burst or q.limit) + q.debt
  q.entry, q.size = '<dI4I4', 16
  if kind == 7 then q.entry, q.size = '<ddd', 24 end
  if kind <= 2 then
    local a, b = q.limit, q.period
    while a > 0 do a, b = b % a, a end
    q.l, q.p = q.limit / b, q.period / b
    if q.limit == 0 then q.l, q.p = 1, 1 end
    local us, num = divide(times(digits(q.most), q.p), q.l)
    q.ceiling, q.ceiling_n = number_of(us), num
  end
  return q, place
end

local STATES = {'<d', '<dd', '<dd', '<dd', '<dI4I4', [9] = '<ddd', [10] = '<dd'}

-- In use: parts, as digits, of how many.
local function used_of(q, at, n, m)
  local kind, units = q.kind, 0
  n, m = n or 0, m or 0
  if not (at >= 0 and at < 9007199254740992 and n >= 0 and n < 9007199254740992) then return {0}, 1 end
  if kind <= 2 then
    if at < now then return {0}, 1 end
    local us, num = at - now, math.min(n, q.l - 1)
    if us > q.ceiling or (us == q.ceiling and num > q.ceiling_n) then us, num = q.ceiling, q.ceiling_n end
    return plus(times(digits(us), q.l), num), q.p
  elseif kind == 3 then
    units = step_level(now, at, n, q.most, q.limit, q.period, q.epoch)
  elseif kind == 4 or kind == 10 then
    if at > now then units = n end
  elseif kind == 9 then
    local phase, _, strikes = block_view(now, at, n, m, q.limit, q.period, q.memory)
    units = phase == 2 and q.limit or phase == 1 and strikes or 0
  else
    local start = at - 2 * q.period
    local x = {
      starts = {}, units = {}, have = 0, all = true, total = n + m, gone = 0, cut = 0, cut_at = 0, add = 0, last = start,
    }
    for number, count in ipairs({n, m}) do
      if count > 0 then
        x.have = x.have + 1
        x.starts[x.have], x.units[x.have] = start - (2 - number) * q.period, count
      end
    end
    x.newest, x.newest_units = x.starts[x.have], x.units[x.have]
    trail_view(x, q)
    units = x.used
  end
  return digits(units), 1
end

local function divide_up(list, by)
  local quotient, rest = divide(list, by)
  if rest > 0 then return plus(quotient, 1) end
  return quotient
end

-- A state in which so much is in use, or the same share of its capacity as of a capacity of `from`; nothing if that is none.
local function with_used(q, parts, of, from)
  local by = 1
  if from then
    by = math.max(from, 1)
    local scaled = times(parts, q.burst or q.limit)
    if is_beyond_128(scaled) then
      scaled, of = times(divide_up(parts, of), q.burst or q.limit), 1
    end
    parts = scaled
  end
  local whole = divide_up(divide_up(parts, of), by)
  local units = math.min(number_of(whole), q.most)
  if q.kind <= 2 then
    if q.burst == 0 then return nil end
    local scaled = times(parts, q.p)
    if is_beyond_128(scaled) then
      scaled = times(whole, q.p)
    else
      scaled = divide_up(divide_up(scaled, of), by)
    end
    local us, num = divide(scaled, q.l)
    us = number_of(us)
    if us > q.ceiling or (us == q.ceiling and num > q.ceiling_n) then us, num = q.ceiling, q.ceiling_n end
    if us == 0 and num == 0 then return nil end
    return now + us, num
  end
  if units == 0 then return nil end
  if q.kind == 3 then
    local next_tick = now + q.period
    if q.epoch == 1 then next_tick = next_tick - now % q.period end
    local at, n = step_store(units, next_tick, q.limit, q.period)
    if at < 0 then return nil end
    return at, n
  elseif q.kind == 4 then
    local past = 0
    if q.epoch == 1 then past = now % q.period end
    return now - past + q.period, units
  elseif q.kind == 5 then
    return now - now % q.period + 2 * q.period, 0, units
  elseif q.kind == 9 then
    local phase, a, b, level =
      block_struck(now, now + q.period, units, 0, 0, q.limit, q.length, 1, q.length, q.memory)
    return block_stored(now, phase, a, b, level, 0, q.memory)
  elseif q.kind == 10 then
    return now + q.period, units
  end
  return now - now % q.grain, units
end

-- What is in use of a value of ours, and of which capacity, and `false` for none; nothing if it is not ours.
local function used_of_value(key, text, list)
  local kind = string.byte(text, 1) or 0
  if kind <= 144 or kind >= 155 or kind == 152 then return nil end
  local q, place = quota_of(text)
  if not q or is_list(q.kind) ~= (list ~= nil) then return false end
  if list then
    if place ~= #text + 1 then return false end
    local x, garbled = trail_load(key, list, q)
    if garbled then return false end
    trail_view(x, q)
    return digits(x.used), 1, q.limit
  end
  local state = STATES[q.kind]
  if #text ~= place - 1 + #pack(state, 0, 0, 0) then return false end
  local parts, of = used_of(q, unpack(state, text, place))
  return parts, of, q.burst or q.limit
end

-- The state of another block as one of this, in which what is closed stays so; -1 for none, nothing if it is no block.
local function adopted(q, text, list)
  if q.kind ~= 9 or list or string.byte(text, 1) ~= 153 then return nil end
  local from, place = quota_of(text)
  if not from or #text ~= place - 1 + 24 then return nil end
  local at, n, m = unpack('<ddd', text, place)
  if not (at >= 0 and at < 9007199254740992 and n >= 0 and n < 2 ^ 45 and m >= 0 and m < 2 ^ 19) then return nil end
  return block_adopt(now, at, n, m, from, q[3], q[4], q[5], q[6], q[7], q[8])
end
