-- Refunds what a receipt holds, if the state still has it. A list is written here; otherwise the
-- state to write is returned. This is what `twin(0)` does with a state. `f` has the fields of the
-- form, in their order, and `other` what the look at the value returned, if there was one.
--
-- `q` has the form's ten numbers. `r` has what the receipt holds: the units, or their span in
-- `units` and `num`, and its instant and number in `at` and `n`.

local function at_most(us, num, us2, num2)
  if us < us2 or (us == us2 and num < num2) then return us, num end
  return us2, num2
end

local function gcra_ahead(at, n, ceiling, ceiling_n, l)
  if at < now then return 0, 0 end
  return at_most(at - now, math.min(n, l - 1), ceiling, ceiling_n)
end

-- Returns the state to write, or nothing if there is nothing to refund; then true if that is because a
-- later slot of the queue is taken.
local function refund_pair(kind, q, r, at, n, m)
  if kind <= 2 then
    local ceiling, l, ceiling_n = q[3], q[4], q[7] or 0
    local us, num = gcra_ahead(at, n, ceiling, ceiling_n, l)
    local r_num = r.num
    if r_num < 0 then -- of a queue: only if no other request has queued behind it
      local own = math.min(n, l - 1) -- without numerators, n means nothing
      if at >= now and (us ~= at - now or num ~= own) then return nil end
      if at ~= r.at or own ~= r.n then
        local r_own = math.min(r.n, l - 1)
        local is_ahead = r.at > now or r.at == now and r_own > 0
        return nil, is_ahead and (at > r.at or at == r.at and own > r_own)
      end
      r_num = -1 - r_num
    end
    local given, given_n = at_most(r.units, r_num, gcra_ahead(r.at, r.n, ceiling, ceiling_n, l))
    given, given_n = at_most(given, given_n, us, num)
    if given == 0 and given_n == 0 then return nil end
    us, num = us - given, num - given_n
    if num < 0 then us, num = us - 1, num + l end
    if us == 0 and num == 0 then return -1 end
    return now + us, num
  end
  if r.units <= 0 then return nil end
  if kind == 3 then
    local _, step_level, step_store = twin(kind)
    local most, tokens, tick, epoch = q[3], q[4], q[5], q[6]
    local missing, next_tick = step_level(now, at, n, most, tokens, tick, epoch)
    local left = step_level(now, r.at, r.n, most, tokens, tick, epoch)
    local given = math.min(r.units, left, missing)
    if given <= 0 then return nil end
    return step_store(missing - given, next_tick, tokens, tick)
  elseif kind == 4 or kind == 11 then
    if at ~= r.at or at <= now then return nil end
    if n <= r.units then return -1 end
    return at, n - r.units, m
  elseif kind == 8 then
    local _, block_view, block_stored = twin(kind)
    local limit, period, memory = q[3], q[4], q[8]
    local phase, a, b, level, forget, _, window, strikes =
      block_view(now, at, n, m or 0, limit, period, q[5], q[6], q[7], memory)
    if phase == 1 then window, strikes = a, b end
    if phase == 0 or strikes == 0 or window ~= r.at then return nil end
    strikes = math.max(strikes - r.units, 0)
    if phase == 2 and strikes >= limit then
      return block_stored(now, phase, a, b, level, forget, memory, window, strikes)
    end
    if phase == 2 then -- the block is undone, and what was remembered before it is remembered again
      local span = r.n % 35184372088832
      local past = (r.n - span) / 35184372088832
      local later = past % 2
      level, forget = (past - later) / 2, later == 1 and window + span or math.max(window - span, 0)
      window, forget = math.min(window, now + period), math.min(forget, now + memory)
    end
    phase = strikes > 0 and window > now and 1 or 0
    return block_stored(now, phase, window, strikes, level, forget, memory)
  elseif kind == 9 then
    if at <= now or r.at <= now then return nil end
    if n <= r.units then return -1 end
    return math.min(at, now + q[4]), n - r.units
  elseif kind ~= 5 then
    error('refund.lua: refund_pair refunds no states of kind ' .. kind)
  end
  local period, start = q[5], at - 2 * q[5]
  local life = q[6] == 1 and period or 2 * period
  if r.at + life <= now then return nil end
  if r.at == start and m > 0 then
    m = math.max(m - r.units, 0)
  elseif r.at == start - period and n > 0 then
    n = math.max(n - r.units, 0)
  else
    return nil
  end
  if m > 0 then return at, n, m end
  if n > 0 then return at - period, 0, n end
  return -1
end

-- Takes units out of the entry of a list that starts at `r.at`. Returns true if it found some, and
-- the list is not empty.
local function refund_list(key, layout, life, r)
  local length = redis.call('LLEN', key)
  local entry = function(number) return unpack(layout, redis.call('LINDEX', key, number)) end
  local low, high = 1, length - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if entry(middle) < r.at then low = middle + 1 else high = middle end
  end
  if low ~= high then return end
  local start, units = entry(low)
  if start ~= r.at or start + life <= now then return end
  local given = math.min(r.units, units)
  if given <= 0 then return end
  local newest, newest_units, total = entry(-1)
  total = total - given
  if total <= 0 then
    redis.call('DEL', key)
    return
  end
  if low < length - 1 then
    redis.call('LSET', key, low, pack(layout, start, units - given, 0))
    redis.call('LSET', key, -1, pack(layout, newest, newest_units, total))
    return true
  end
  units = units - given
  while units <= 0 do
    redis.call('RPOP', key)
    start, units = entry(-1)
  end
  redis.call('LSET', key, -1, pack(layout, start, units, total))
  local left = math.max(start + life - now, 0)
  redis.call('PEXPIRE', key, (left - left % 1000) / 1000 + longer)
  return true
end

if other and other.over then return end
local kind, layout, head, life = f[1], f[2], f[3], f[15]
local _, log_write = twin(kind)
local r = {}
r.units, r.num, r.at, r.n = unpack('<dddd', f[16], 2)
if other and other.whole then
  -- The list is not in Redis yet. It is written if the receipt's entry is still in it.
  local whole, has_it = other.whole, false
  for number = 2, #whole do
    local start, units = unpack(layout, whole[number])
    if start == r.at and start + life > now and r.units > 0 and units > 0 then
      whole[number], has_it = pack(layout, start, math.max(units - r.units, 0), 0), true
    end
  end
  if not has_it then return end
  local newest, units
  while #whole > 1 do
    newest, units = unpack(layout, whole[#whole])
    if units > 0 then break end
    whole[#whole], newest = nil, nil
  end
  log_write(
    try, pack, unpack, now, longer, key, found, layout, head, f[4], life, 0, 0, newest, units, 0, true, whole
  )
elseif kind == 6 or kind == 7 then
  if at and refund_list(key, layout, life, r) and other then redis.call('LSET', key, 0, head) end
elseif found ~= '\0' then
  return refund_pair(kind, {_G.unpack(f, 6, 15)}, r, at, n, m)
end
