-- Looks at a value that is not as the form's quota writes it. If another quota wrote it, it is read
-- as a state of the form's (the twin of carry.rs), and stays as it is until something is taken. If
-- it is garbled, it counts as none. This is what `twin(0)` does unless it is given a state. `f` has
-- the fields of the form, in their order.
--
-- The fields of `y`, which it returns:
--   found, at, n, m: the state, see `charge`;
--   whole: the elements of the list, if it is not the one in Redis;
--   ahead: even a denied charge has to write it;
--   over: nothing may be written, because more is in use than the form's quota could keep.

local kind, layout, head = f[1], f[2], f[3]
local is_list = kind == 6 or kind == 7
local _, step_level, step_store = twin(3)
local entry_log, _, log_entry, muldiv = twin(6)
local _, block_view, block_stored, block_struck, block_adopt = twin(8)

local function muldiv_up(a, b, c)
  local quotient, rest = muldiv(a, b, c)
  return rest > 0 and quotient + 1 or quotient
end

-- How the state of each kind is packed; false for kinds that are lists. A value of a kind that is not here is foreign.
local STATES = {'<d', '<dd', '<dd', '<dd', '<dI4I4', false, false, '<ddd', '<dd', nil, '<ddd'}

-- Reads a head (see encode.rs). Returns the quota and the place behind the head, or nothing if it
-- is no head of this version.
local function quota_of(text)
  local kind, place, ok = (string.byte(text, 1) or 0) - 160, 2, true
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
  if STATES[kind] == nil then return nil end
  local q = {kind = kind, is_list = kind == 6 or kind == 7, buckets = 1, epoch = 0, oldest = 0, log = 0}
  if kind == 3 or kind == 4 then q.epoch = number() end
  if kind == 11 then
    -- The unit, the first day, and the zone with its length: which calendar it is does not matter here.
    number()
    number()
    place = place + number()
  end
  if kind == 8 then q.memory, q.length, q.factor, q.longest = number(), number(), number(), number() end
  if kind >= 5 and kind <= 7 then
    q.oldest = number()
    if q.oldest > 2 then q.oldest, q.log = 1, 1 end
  end
  q.limit, q.period = number(), number()
  if kind <= 3 then q.burst = number() end
  q.debt = number()
  if q.is_list then q.buckets = number() end
  local units = 1000000000000000
  if not ok or q.period < 1 or q.period > 31622400000000 or q.limit > units or q.debt > units or (q.burst or 0) > units then
    return nil
  end
  q.grain = q.log == 1 and 1 or q.period / q.buckets
  q.life = q.oldest == 1 and q.period or q.period + q.grain
  q.most = (q.burst or q.limit) + q.debt
  q.entry, q.size = '<dI4I4', 16
  if kind == 5 or kind == 7 then q.entry, q.size = '<ddd', 24 end
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

local function divide_up(list, by)
  local quotient, rest = divide(list, by)
  if rest > 0 then return plus(quotient, 1) end
  return quotient
end

local function next_multiple(number, grid)
  local over = number % grid
  return over == 0 and number or number - over + grid
end

-- Dates units. They were taken at `taken` at the latest, if that is known, and return at `back`.
-- `exact` says that `taken` is exact. `whole` is how many they were before some stopped to count.
local function date(c, taken, back, units, whole, exact)
  if whole <= 0 then return end
  c.dated[#c.dated + 1] = {taken = taken, back = back, units = units, whole = whole, exact = exact}
  c.back = back
end

-- The number of slices of equal length in which the units of a bucket are dated for a log or a
-- sliding window.
local SLICES = 32

-- Dates the units of a bucket, which return one after the other until `back`: together, or if
-- `sliced`, each slice by the instant at which its last unit returns. `in_use` returns how many
-- units are still in use at a later instant.
local function date_bucket(c, back, units, sliced, in_use)
  if not sliced then return date(c, nil, back, units, units) end
  local slice, before = math.ceil((back - now) / SLICES), units
  for nth = 1, SLICES do
    local ends, after = math.min(now + nth * slice, back), 0
    if ends < back then after = in_use(ends) end
    date(c, nil, ends, before - after, before - after)
    before = after
  end
end

-- Sets the units of a list that are in use, their dates, and the starts of their entries.
local function carry_log(c, key, list, newest, units, total)
  local q = c.q
  local _, _, _, gone, _, _, _, _, _, whole, start, used = entry_log(
    try, pack, unpack, now, key, list, newest, units, total, q.entry, q.size,
    0, 2 ^ 62, q.limit, q.most, q.period, q.grain, q.oldest, q.log, 0, q.life
  )
  if whole then key, list = nil, whole end
  c.units, c.starts = used, {}
  local at, number = math.max(now, start), gone
  while true do
    number = number + 1
    local start, whole = log_entry(try, unpack, key, list, q.entry, q.size, number)
    if not start then break end
    if whole > 0 then
      local edge, units = start + q.period, whole
      if at >= edge then
        if q.oldest == 0 then
          units = muldiv(whole, q.grain - (at - edge), q.grain)
        elseif q.oldest == 1 then
          units = 0
        end
      end
      date(c, math.min(start + q.grain - 1, now), start + q.life, units, whole, true)
      c.starts[#c.starts + 1] = start
    end
  end
end

-- Sets the units of a state of a few numbers that are in use, and their dates. `sliced` says that a
-- log or a sliding window takes them over.
local function carry_pair(c, at, n, m, sliced)
  local q, kind = c.q, c.q.kind
  n, m = n or 0, m or 0
  if not (at >= 0 and at < 9007199254740992 and n >= 0 and n < 9007199254740992) then return end
  if kind <= 2 then
    if at < now then return end
    local us, num = at - now, math.min(n, q.l - 1)
    if us > q.ceiling or (us == q.ceiling and num > q.ceiling_n) then us, num = q.ceiling, q.ceiling_n end
    c.parts, c.of = plus(times(digits(us), q.l), num), q.p
    local function in_use(later)
      local left = now + us - later
      if left < 0 then return 0 end
      local units, rest = muldiv(left, q.l, q.p)
      return units + math.ceil((rest + num) / q.p)
    end
    date_bucket(c, now + us + (num > 0 and 1 or 0), in_use(now), sliced, in_use)
  elseif kind == 3 then
    local missing, next_tick = step_level(now, at, n, q.most, q.limit, q.period, q.epoch)
    local ticks = math.ceil(missing / math.max(q.limit, 1))
    c.units, c.tick = missing, math.max(next_tick - q.period, 0)
    at, n = step_store(missing, next_tick, q.limit, q.period)
    date_bucket(c, next_tick + (ticks - 1) * q.period, missing, sliced, function(later)
      return (step_level(later, at, n, q.most, q.limit, q.period, q.epoch))
    end)
  elseif kind == 4 then
    if at <= now then return end
    local ends = at
    if at - now > 2 * q.period then
      local past = q.epoch == 1 and now % q.period or 0
      ends = now - past + q.period
      if past > 0 then ends = ends + q.period end
    end
    c.units = n
    date(c, math.min(math.max(ends - q.period, 0), now), ends, n, n)
  elseif kind == 11 then
    if at <= now then return end
    c.units = n
    date(c, math.min(math.max(m, 0), now), at, n, n)
  elseif kind == 8 then
    local phase, a, strikes =
      block_view(now, at, n, m, q.limit, q.period, q.length, q.factor, q.longest, q.memory)
    if phase == 2 then
      c.units = q.limit
      date(c, nil, a, c.units, c.units)
    elseif phase == 1 then
      c.units = strikes
      date(c, math.max(a - q.period, 0), a, strikes, strikes)
    end
  elseif kind == 9 then
    if at <= now then return end
    at = math.min(at, now + q.period)
    c.units = n
    date(c, math.max(at - q.period, 0), at, n, n)
  elseif kind == 5 then
    local list, start, newest, units = {''}, at - 4 * q.period, nil, nil
    for _, count in ipairs({n, m}) do
      start = start + q.period
      if count > 0 then
        newest, units = start, count
        list[#list + 1] = pack(q.entry, start, count, 0)
      end
    end
    carry_log(c, nil, list, newest, units, n + m)
  else
    error('look.lua: carry_pair reads no states of kind ' .. kind)
  end
end

-- Returns the units of a value that are in use, or nothing if the value is garbled.
local function carried(text, list, sliced)
  if STATES[(string.byte(text, 1) or 0) - 160] == nil then error('\3', 0) end -- it is not of this version
  local q, place = quota_of(text)
  if not q or q.is_list ~= (list ~= nil) then return nil end
  local c = {q = q, capacity = q.burst or q.limit, dated = {}, back = 0, units = 0}
  if list then
    if place ~= #text + 1 then return nil end
    local newest = #list > 2 and try('LINDEX', key, '-1') or list[2]
    if not newest or #newest ~= q.size or #list[2] ~= q.size or #list[#list] ~= q.size then return nil end
    c.list, c.newest, c.units, c.total = list, unpack(q.entry, newest)
    local is_ours = c.newest >= 0 and c.newest < 9007199254740992 and c.units >= 0 and c.total >= c.units
    return is_ours and c
  end
  local state = STATES[q.kind]
  if #text ~= place - 1 + #pack(state, 0, 0, 0) then return nil end
  local at, n, m = unpack(state, text, place)
  carry_pair(c, at, n, m, sliced)
  return c
end

-- Returns entries, the oldest first, as this quota counts them: at most `most` units, the newest.
local function scaled(c, q, starts, units, most, share)
  local sum, before, list, counts = 0, 0, {}, {}
  for number = #starts, 1, -1 do
    sum = sum + units[number]
    local upto = sum
    if share then upto = muldiv_up(sum, q.burst or q.limit, math.max(c.capacity, 1)) end
    if upto > most then upto = most end
    if #list > 0 and list[#list] == starts[number] then
      counts[#list] = counts[#list] + upto - before
    elseif upto > before then
      list[#list + 1], counts[#list + 1] = starts[number], upto - before
    end
    before = upto
  end
  local all, of_all = {}, {}
  for number = #list, 1, -1 do
    all[#all + 1], of_all[#all + 1] = list[number], math.min(counts[number], q.most)
  end
  return all, of_all
end

-- Makes the oldest entry so large that the units in it are what it counts for, see
-- `EntryLog::weigh_oldest`.
local function weigh_oldest(q, starts, units)
  local start, count = starts[1], units[1]
  if not start or q.oldest ~= 0 or now <= start + q.period then return end
  local covered = math.max(start + q.period + q.grain - now, 1)
  local whole = math.min(muldiv_up(count + 1, q.grain, covered) - 1, q.most)
  local left = count - muldiv(whole, covered, q.grain)
  units[1] = whole
  if left <= 0 then return end
  if starts[2] == start + q.grain then
    units[2] = math.min(units[2] + left, q.most)
  else
    table.insert(starts, 2, start + q.grain)
    table.insert(units, 2, left)
  end
end

-- Returns the entries of dated units (see `dated` in entry_log.rs).
local function dated_entries(c, q, whole, share)
  local grain, most = q.grain, math.min(whole, q.most)
  local latest, starts, units = now - now % grain, {}, {}
  for _, d in ipairs(c.dated) do
    local taken, late = d.taken or 0, math.max(d.back - q.period, 0)
    local own = taken - taken % grain
    if not d.exact or late > taken + 1 or own + q.period <= now then
      local start = late - late % grain
      if q.oldest == 1 or q.oldest == 0 and start + q.period >= now then start = next_multiple(late, grain) end
      starts[#starts + 1], units[#units + 1] = math.max(math.min(start, latest), own), d.units
    else
      most = q.log == 1 and q.most or 2 ^ 62
      starts[#starts + 1], units[#units + 1] = own, d.whole
    end
  end
  starts, units = scaled(c, q, starts, units, most, share)
  weigh_oldest(q, starts, units)
  return starts, units
end

-- Returns the instant until which all units count in a window of one period.
local function counts_until(c, period)
  local last = c.dated[#c.dated]
  local taken = math.min(last and last.taken or now, now)
  return math.max(taken + period, math.min(c.back, now + period))
end

-- Sets the state of `y`, and whether it is to be written even if nothing is taken.
local function take_over(y, text, list)
  local q, share = quota_of(head), string.byte(f[16]) == 1
  if not q then error('look.lua: STATES has no layout for states of kind ' .. kind) end
  local c = carried(text, list, q.kind >= 5 and q.kind <= 7)
  if not c then return end
  local function found(at, n, m)
    if at and at >= 0 then
      y.at, y.n, y.m = at, n or 0, m or 0
      y.found = '\1' .. string.sub(pack(layout, head, y.at, y.n, y.m), #head + 1)
    end
  end
  if q.kind == 8 and c.q.kind == 8 then
    local at, n, m = unpack('<ddd', text, #text - 23)
    if not (at >= 0 and at < 9007199254740992 and n >= 0 and n < 2 ^ 45 and m >= 0 and m < 2 ^ 19) then return end
    y.ahead, at, n, m = block_adopt(now, at, n, m, c.q, f[8], f[9], f[10], f[11], f[12], f[13])
    return found(at, n, m)
  end
  local alike = c.q.kind >= 5 and c.q.kind <= 7 and q.kind >= 5 and q.kind <= 7 and c.q.period == q.period
    and c.q.grain == q.grain and c.q.oldest == q.oldest
  if c.list then
    local newest, units, total = c.newest, c.units, c.total
    if
      is_list and alike and not share and c.q.size == q.size and q.most > 0 and (newest or 0) <= now
      and (total <= q.most or q.log ~= 1 and q.most >= c.q.most)
    then
      -- Its entries are entries of the form's quota too, so they stay where they are.
      y.found, y.at, y.n, y.m, y.whole = c.list, newest, units, total, nil
      return
    end
    carry_log(c, key, c.list, newest, units, total)
  end

  local parts, of, by = c.parts or digits(c.units), c.of or 1, 1
  if share then
    by = math.max(c.capacity, 1)
    local product = times(parts, q.burst or q.limit)
    if is_beyond_128(product) then
      product, of = times(divide_up(parts, of), q.burst or q.limit), 1
    end
    parts = product
    -- An entry keeps what it counts for, see `Carried::in_proportion`.
    for _, d in ipairs(c.dated) do d.whole = d.units end
  end
  local whole = number_of(divide_up(divide_up(parts, of), by))
  local units = math.min(whole, q.most)
  local function fit(longest)
    y.over = whole > q.most
    y.ahead = c.back - now > longest and not y.over
  end
  if q.kind <= 2 then
    fit(q.ceiling)
    if q.burst == 0 then return end
    local product = times(parts, q.p)
    if is_beyond_128(product) then
      product = times(digits(whole), q.p)
    else
      product = divide_up(divide_up(product, of), by)
    end
    local us, num = divide(product, q.l)
    us = number_of(us)
    if us > q.ceiling or (us == q.ceiling and num > q.ceiling_n) then us, num = q.ceiling, q.ceiling_n end
    if us == 0 and num == 0 then return end
    return found(now + us, num)
  elseif q.kind == 3 then
    fit(math.ceil(q.most / math.max(q.limit, 1)) * q.period)
    local next_tick = now + q.period
    if q.epoch == 1 then
      next_tick = next_tick - now % q.period
    elseif c.tick then
      next_tick = c.tick + (math.floor(math.max(now - c.tick, 0) / q.period) + 1) * q.period
    end
    return found(step_store(units, next_tick, q.limit, q.period))
  elseif q.kind == 4 then
    fit(2 * q.period)
    if units == 0 then return end
    local ends = counts_until(c, q.period)
    if q.epoch == 1 then ends = math.max(now - now % q.period + q.period, next_multiple(ends, q.period)) end
    return found(ends, units)
  elseif q.kind == 11 then
    local start, open, following = f[13], f[14], f[15]
    fit(following - now)
    if units == 0 then return end
    local last = c.dated[#c.dated]
    local taken = math.min(last and last.taken or now, now)
    if now > start and (taken > start or c.back > open) then return found(following, units, open) end
    return found(open, units, start)
  elseif q.kind == 8 then
    if units == 0 then return end
    local phase, a, b, level =
      block_struck(now, counts_until(c, q.period), units, 0, 0, q.limit, q.length, 1, q.length, q.memory)
    return found(block_stored(now, phase, a, b, level, 0, q.memory))
  elseif q.kind == 9 then
    y.ahead = c.back - now > 2 * q.period
    if whole == 0 then return end
    return found(counts_until(c, q.period), whole)
  elseif q.kind ~= 5 and not is_list then
    error('look.lua: take_over makes no states of kind ' .. q.kind)
  end

  fit(2 * q.period)
  local starts, counts = {}, {}
  if q.most > 0 and alike then
    for number, d in ipairs(c.dated) do counts[number] = d.whole end
    starts, counts = scaled(c, q, c.starts or {}, counts, q.log == 1 and q.most or 2 ^ 62, share)
    if share then weigh_oldest(q, starts, counts) end
  elseif q.most > 0 then
    starts, counts = dated_entries(c, q, whole, share)
  end
  if q.kind == 5 then
    local current = starts[#starts]
    if not current then return end
    local n, m = 0, 0
    for number, start in ipairs(starts) do
      if start == current then m = counts[number] elseif start == current - q.period then n = counts[number] end
    end
    return found(current + 2 * q.period, math.min(n, q.most), math.min(m, q.most))
  end
  local whole, sum = {head}, 0
  for number, start in ipairs(starts) do
    sum = sum + counts[number]
    whole[number + 1] = pack(layout, start, counts[number], sum)
  end
  y.found, y.at, y.n, y.m, y.whole = whole, starts[#starts], counts[#counts], sum, whole
end

-- Reads the key: its text, or the first element of its list and the list.
local function read()
  for try_list = 0, 1 do
    local value
    if is_list == (try_list == 0) then value = try('LRANGE', key, '0', '2') else value = try('GET', key) end
    if type(value) ~= 'table' then return value end
    if not value.err then return value[1], value end
    if not string.find(value.err, 'WRONGTYPE', 1, true) then error(value, 0) end
  end
  error('\3', 0)
end

local y = {found = '\0', at = 0, n = 0, m = 0}
if is_list then
  local none = {head}
  y = {found = none, m = 0, whole = none}
end
local text, list = read()
local is_own = list and text == head or not list and #text == f[4] and string.sub(text, 1, #head) == head
if not is_own then take_over(y, text, list) end
return y, y.found, y.at, y.n, y.m
