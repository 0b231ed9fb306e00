-- The usual case of trail.lua, answered as there: the clock did not step back, no denied request is counted, and what has to
-- be looked at is among the thirty oldest entries and the newest. Two of them are read at once, the others when they are
-- needed. Otherwise nothing is done, and nothing answered.
--
-- What it uses of the script's beginning is handed to it: each local variable that a function shares with what is around it
-- costs a call some 400 instructions, one that is handed over 10.
local function trail_plain(
  try, pack, unpack, now, longer,
  key, entry, head, size, cost, bound, limit, most, period, grain, oldest, log, count_denied, life
)
  local list = try('LRANGE', key, '0', '2')
  if list.err then return nil end
  local found = #list
  local start = now - now % grain
  local newest, newest_units, total, gone, used, counted, first = nil, 0, 0, 0, 0, 0
  if found > 0 then
    local last = list[found]
    if found > 2 then last = try('LINDEX', key, '-1') end
    if list[1] ~= head or found < 2 or #last ~= size then return nil end
    newest, newest_units, total = unpack(entry, last)
    if not (newest >= 0 and newest <= start and total >= newest_units) then return nil end
    used, counted = total, total
    local number = 1
    while number < found do
      number = number + 1
      if #list[number] ~= size then return nil end
      local from, units = unpack(entry, list[number])
      if units <= 0 then return nil end
      if now < from + period then
        first = from
        break
      end
      if now < from + life then
        local part = units
        if oldest == 0 then part = math.floor(units * (grain - (now - from - period)) / grain) end
        used, first = used - units + part, from
        break
      end
      gone, counted, used = gone + 1, counted - units, used - units
      if number == 3 or number == 7 then
        local more = number == 3 and try('LRANGE', key, '3', '6') or try('LRANGE', key, '7', '30')
        for at = 1, #more do list[number + at] = more[at] end
        found = #list
      end
    end
    if not first and (found > 30 or used ~= 0) then return nil end
  end

  local ok, units = used + cost <= bound, 0
  if ok then
    units = cost
    if units > most - used then units = most - used end
    if units <= 0 then return nil end
    used, counted = used + units, counted + units
  elseif count_denied == 1 or cost > limit then
    return nil
  end

  -- The wait until `target` units are in use, if it has to be told.
  local remaining, wait, target = limit - used, 0
  if remaining < 0 then remaining = 0 end
  if not ok then target = limit - cost elseif remaining == 0 then target = limit - 1 end
  if target and used > target then
    local newer, room, from, held = counted
    local number = gone + 1
    repeat
      number = number + 1
      if number > found and (found == 3 or found == 7) then
        local more = found == 3 and try('LRANGE', key, '3', '6') or try('LRANGE', key, '7', '30')
        for at = 1, #more do list[found + at] = more[at] end
        found = #list
      end
      if number > found or #list[number] ~= size then return nil end
      from, held = unpack(entry, list[number])
      if from == start then return nil end
      newer = newer - held
    until newer <= target
    room = target - newer
    wait = from + period - now
    if oldest == 2 then
      wait = wait + grain
    elseif oldest == 0 then
      wait = wait + grain - math.ceil((room + 1) * grain / held) + 1
    end
    if wait < 0 then wait = 0 end
  end

  if units > 0 then
    if newest == start then newest_units = newest_units + units else newest_units = units end
  end
  local reset = 0
  if used > 0 then
    reset = (ok and start or newest) + period - now
    if oldest == 2 then
      reset = reset + grain
    elseif oldest == 0 then
      reset = reset + grain - math.ceil(grain / newest_units) + 1
    end
    if reset < 0 then reset = 0 end
  end
  local window = wait
  if ok and remaining > 0 then
    if log == 1 then window = (first or start) + period - now else window = start + grain - now end
  end

  if ok then
    local left = start + life - now
    left = (left - left % 1000) / 1000 + longer
    local changed, done, failed = pack(entry, start, newest_units, counted)
    -- Redis may refuse any of these. A list that is there has its end set first, so that then nothing was charged; a new
    -- one that cannot be given an end is deleted.
    if newest then done = try('PEXPIRE', key, left) end
    if type(done) == 'table' then
      failed = done.err
    elseif gone > 0 then
      local first = gone == 1 and '1' or gone -- a number would be printed
      failed = try('LSET', key, first, head).err
      if not failed then
        failed = try('LTRIM', key, first, '-1').err
        if failed then try('LSET', key, first, list[gone + 1]) end
      end
    end
    if failed then
    elseif newest == start then
      failed = try('LSET', key, '-1', changed).err
    elseif newest then
      done = try('RPUSH', key, changed)
      if type(done) == 'table' then failed = done.err end
    else
      done = try('RPUSH', key, head, changed)
      if type(done) ~= 'table' then
        done = try('PEXPIRE', key, left)
        if type(done) == 'table' then try('DEL', key) end
      end
      if type(done) == 'table' then failed = done.err end
    end
    if failed then
      failed = string.sub(failed, 1, 1000)
      return pack('<BI2c0', 4, #failed, failed)
    end
  end
  return pack('<BBdddddd', 2, ok and 1 or 0, remaining, reset, window, ok and 0 or wait, units, start)
end
