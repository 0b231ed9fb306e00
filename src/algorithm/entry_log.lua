-- Twin of entry_log.rs: dated entries, and when each stops to count.
--
-- 2 Parameters: the cost, what may be in use after it, the limit, the most units that are counted at all, the period, the
--   grain, what the entry counts for that the period's edge passes over (0 in proportion, 1 nothing, 2 in full), 1 for a log,
--   1 if denied requests count, and the life of an entry, from its start until it counts for nothing.
-- 3 State: a list. Its first element is the head, which says what quota wrote it. Then come the entries, the oldest first:
--   start, units, and the units of all entries when this was the newest. An entry in the middle may have no units left.
--
-- `list` has the elements that were read so far. `key` is the stored key with the other ones, or nil if there are none.

-- Returns the start and the units of an entry, or nothing if there is no such entry.
local function log_entry(try, unpack, key, list, layout, size, number)
  local text = list[number + 1]
  if not text and key then
    -- The first read was of three elements.
    local found = #list
    local upto = found == 3 and '6' or found == 7 and '30' or found > 30 and (found - 31) % 512 == 0 and found + 511
    if upto then
      local more = try('LRANGE', key, found == 3 and '3' or found == 7 and '7' or found, upto)
      for at = 1, #more do list[found + at] = more[at] end
      text = list[number + 1]
    end
  end
  if text and #text == size then return unpack(layout, text) end
end

-- Returns the first instant at which an entry of more than `room` units counts for at most `room`.
local function log_leaves(start, units, room, period, grain, oldest)
  local edge = start + period
  if oldest == 1 then return edge end
  if oldest == 2 then return edge + grain end
  if units < 1 then units = 1 end
  local covered, rest = muldiv(room + 1, grain, units)
  if rest > 0 then covered = covered + 1 end
  return edge + grain - covered + 1
end

-- 4 decide: whether the quota allows it, the answer, whether anything is to be written, and what `log_write` needs; then
--   the start of the entry of now, and the units in use. `newest`, `newest_units` and `total` are what the last element says.
local function entry_log(
  try, pack, unpack, now, key, list, newest, newest_units, total, layout, size,
  cost, bound, limit, most, period, grain, oldest, log, count_denied, life
)
  -- The start of the entry to which a charge of now belongs, and the instant at which entries are looked at.
  local start, at, first, whole = now - now % grain, now, nil, nil
  if newest and newest > start then
    if newest - start <= period then
      start, at = newest, newest
    else
      -- All entries are as young as the newest, or younger than a life: they become one.
      if start < now then start = start + grain end
      if total > most then total = most end
      newest, newest_units, at = start, total, start
      key, list = nil, {list[1], pack(layout, start, total, total)}
      whole = list
    end
  end
  -- How many entries are over, the units of the others, and the units in use.
  local gone, counted, used = 0, total, total
  while true do
    local from, units = log_entry(try, unpack, key, list, layout, size, gone + 1)
    if not from then
      counted, used = 0, 0 -- as they are already, unless another program wrote here
      break
    end
    if at < from + life then
      if units > 0 then first = from end
      if at < from + period then break end
      if oldest == 0 then
        used = used - units + muldiv(units, grain - (at - from - period), grain)
      elseif oldest == 1 then
        used = used - units
      end
      break
    end
    gone, counted, used = gone + 1, counted - units, used - units
  end
  local joins = newest == start

  local ok, units, cut = used + cost <= bound, 0, 0
  if ok then
    units = most - used
  elseif count_denied == 1 then
    units = limit
    if log ~= 1 and joins then units = limit - newest_units end
  end
  if units > cost then units = cost end
  if units > 0 then
    counted, used = counted + units, used + units
    newest, newest_units = start, joins and newest_units + units or units
  else
    units = 0
  end
  if not ok and units > 0 and log == 1 then
    -- A log has no more units than its limit because of denied requests: the oldest ones make room.
    local over = counted - math.max(limit, math.min(counted - units, most))
    if over > 0 then counted, used = counted - over, used - over end
    while over > 0 do
      local from, held = log_entry(try, unpack, key, list, layout, size, gone + 1)
      if not from or from == newest then
        newest_units, over = counted, 0
      elseif held <= over then
        gone, over, first = gone + 1, over - held, nil
      else
        cut, over = over, 0
      end
    end
  end

  -- The wait until `target` units are in use, if it is reported.
  local remaining, wait, target = limit - used, 0, nil
  if remaining < 0 then remaining = 0 end
  if not ok and cost <= limit then
    target = limit - cost
  elseif remaining == 0 and limit > 0 then
    target = limit - 1
  end
  if target and used > target then
    local newer, number, from, held = counted, gone, nil, nil
    repeat
      number = number + 1
      from, held = log_entry(try, unpack, key, list, layout, size, number)
      if not from or from == newest then
        from, held = newest, newest_units
      elseif number == gone + 1 then
        held = held - cut
      end
      newer = newer - held
    until newer <= target or from == newest
    wait = log_leaves(from, held, target - newer, period, grain, oldest) - now
    if wait < 0 then wait = 0 end
  end

  local reset, window = 0, wait
  if used > 0 then
    -- The function says the same of a log. The call would cost a log's check 1 % (bench "server").
    reset = (oldest == 1 and newest + period or log_leaves(newest, newest_units, 0, period, grain, oldest)) - now
  end
  if reset < 0 then reset = 0 end
  if remaining > 0 and (ok or cost > limit) then
    local from = start + grain - period
    if log == 1 then
      local number = gone
      while not first do
        local held
        number = number + 1
        first, held = log_entry(try, unpack, key, list, layout, size, number)
        if not first then first = units > 0 and start or now elseif held <= 0 then first = nil end
      end
      from = first
    end
    window = from + period - now
    if window < 0 then window = 0 end
  end
  if ok then wait = 0 elseif cost > limit then wait = -1 end
  local told = pack('<BBdddddd', 2, ok and 1 or 0, remaining, reset, window, wait, ok and units or 0, start)
  return ok, told, units > 0 or whole and cost > 0, gone, cut, newest, newest_units, counted, joins, whole, start, used
end

-- Writes what `entry_log` decided. `whole` is the list if it cannot be changed in Redis step by step.
local function log_write(
  try, pack, unpack, now, longer, key, list, layout, head, size, life,
  gone, cut, newest, newest_units, counted, joins, whole
)
  local call, left = redis.call, (newest or now) + life - now
  if left < 0 then left = 0 end
  left = (left - left % 1000) / 1000 + longer
  -- The end is set first: if Redis refuses that, nothing may be written, since it would stay for ever. Units that join the
  -- newest entry do not move it.
  if list[1] and not joins or whole then call('PEXPIRE', key, left) end
  if whole then
    -- A key that is deleted cannot be written again where a cluster moves its slot, so new elements go behind the old ones.
    -- A text has to be deleted. Such a slot refuses to look for a key that is not there, and then nothing is deleted.
    local old = try('LLEN', key)
    if type(old) == 'table' then
      call('LLEN', key .. '+')
      call('DEL', key)
      old = 0
    end
    local elements, sum, number = {head}, 0, gone
    repeat
      number = number + 1
      local start, units = log_entry(try, unpack, nil, whole, layout, size, number)
      if start and number == gone + 1 then units = units - cut end
      if newest and (not start or start == newest) then start, units = newest, newest_units end
      if start and units > 0 then
        sum = sum + units
        elements[#elements + 1] = pack(layout, start, units, sum)
      end
      if #elements == 500 then
        call('RPUSH', key, _G.unpack(elements))
        elements = {}
      end
    until not start or start == newest
    if sum == 0 then
      call('DEL', key)
      return
    end
    if #elements > 0 then call('RPUSH', key, _G.unpack(elements)) end
    if old > 0 then call('LTRIM', key, old, -1) end
    call('PEXPIRE', key, left)
    return
  end
  if gone > 0 then
    local first = gone == 1 and '1' or gone -- Redis is slow at making a text of a number
    call('LSET', key, first, head)
    local done = try('LTRIM', key, first, '-1')
    if done.err then
      call('LSET', key, first, list[gone + 1])
      error(done, 0)
    end
  end
  if cut > 0 then
    local start, units = log_entry(try, unpack, key, list, layout, size, gone + 1)
    call('LSET', key, '1', pack(layout, start, units - cut, 0))
  end
  local changed = pack(layout, newest, newest_units, counted)
  if joins then
    call('LSET', key, '-1', changed)
  elseif list[1] then
    call('RPUSH', key, changed)
  else
    call('RPUSH', key, head, changed)
    local done = try('PEXPIRE', key, left)
    if type(done) == 'table' then
      try('DEL', key)
      error(done, 0)
    end
  end
end
