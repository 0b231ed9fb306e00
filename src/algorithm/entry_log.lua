-- Twin of entry_log.rs: dated entries, and when each stops to count.
--
-- 2 Parameters, fields of `q`: cost, bound (what may be in use after it), limit, most (units that are counted at all),
--   period, grain, oldest (what the entry counts for that the period's edge passes over: 0 in proportion, 1 nothing, 2 in
--   full), log and count_denied (1 if so), life (from an entry's start until it counts for nothing).
-- 3 State: a list. First what it was written under, then the entries, the oldest first: start, units, and the units of all
--   when this was the newest. An entry in the middle may have no units left.
--
-- `x` is a trail that is being decided: its entries as far as they were read in `starts` and `units` (`have` of them; `all`
-- if there are no more), those that no longer count (`gone`), what is trimmed off one of them (`cut` off number `cut_at`), and
-- what is added (`add` at `start`, `last` being the newest entry's start before).

local function is_list(kind) return kind == 6 or kind == 7 end

-- The entry of that number, without what is added.
local function trail_read(x, number)
  if number > x.have and not x.all then
    local upto = number + 3
    if upto < 2 * x.have then upto = math.min(2 * x.have, x.have + 512) end
    local list = redis.call('LRANGE', x.key, x.have + 1, upto)
    for at = 1, #list do
      if #list[at] ~= x.entry_size then break end
      x.have = x.have + 1
      x.starts[x.have], x.units[x.have] = unpack(x.entry, list[at])
    end
    if x.have < upto then x.all = true end
  end
  return x.starts[number], x.units[number]
end

-- The entry of that number, as it will be.
local function trail_entry(x, number)
  local start, units = trail_read(x, number)
  if start then
    if x.add > 0 and start == x.last and start == x.start then units = units + x.add end
  elseif x.add > 0 and x.last ~= x.start and number == x.have + 1 then
    start, units = x.start, x.add
  end
  if number == x.cut_at then units = units - x.cut end
  return start, units
end

-- The first instant at which an entry of more than `room` units counts for at most `room`.
local function trail_leaves(q, start, units, room)
  local edge = start + q.period
  if q.oldest == 1 then return edge end
  if q.oldest == 2 then return edge + q.grain end
  if units < 1 then units = 1 end
  local covered = muldiv_up(room + 1, q.grain, units)
  return edge + q.grain - covered + 1
end

-- The clock stepped back by more than a period: the entries come along, to `start`. All of them begin later than that, since
-- what is a life older than the newest was dropped when that was written; so they are one, and none has to be read.
local function trail_gather(x, q, start)
  local units = math.min(x.total, q.most)
  x.starts, x.units, x.have, x.total, x.all = {start}, {units}, 1, units, true
  x.newest, x.newest_units, x.last, x.moved = start, units, start, true
end

-- What still counts: gone, counted, used; and the start of the entry that a request of now belongs to.
local function trail_view(x, q)
  local start, at = now - now % q.grain, now
  if x.newest and x.newest > start then
    if x.newest - start <= q.period then
      start, at = x.newest, x.newest
    else
      if start < now then start = start + q.grain end
      trail_gather(x, q, start)
      at = start
    end
  end
  local gone, counted, used = x.gone, x.total, x.total
  while true do
    local from, units = trail_entry(x, gone + 1)
    if not from then
      counted, used = 0, 0 -- as it is already, unless somebody else wrote here
      break
    end
    if at < from + q.period then break end
    if at >= from + q.life then
      gone, counted, used = gone + 1, counted - units, used - units
    else
      local part = units
      if q.oldest == 0 then part = muldiv(units, q.grain - (at - from - q.period), q.grain) end
      used = used - units + part
      break
    end
  end
  x.gone, x.counted, x.used, x.start = gone, counted, used, start
end

-- The time until at most `target` units are in use, if nothing else comes.
local function trail_wait(x, q, target)
  if x.used <= target then return 0 end
  local newer, number = x.counted, x.gone
  while true do
    number = number + 1
    local start, units = trail_entry(x, number)
    if not start then return 0 end
    newer = newer - units
    if newer <= target then return math.max(trail_leaves(q, start, units, target - newer) - now, 0) end
  end
end

-- Counts so many more units now.
local function trail_add(x, units)
  x.add = units
  if units == 0 then return end
  x.counted, x.used = x.counted + units, x.used + units
  if x.newest == x.start then
    x.newest_units = x.newest_units + units
  else
    x.newest, x.newest_units = x.start, units
  end
end

-- Remaining, reset and window.
local function trail_describe(x, q, retry)
  local remaining = math.max(q.limit - x.used, 0)
  local reset, window = 0, 0
  if x.newest and x.used > 0 then reset = math.max(trail_leaves(q, x.newest, x.newest_units, 0) - now, 0) end
  if retry > 0 then
    window = retry
  elseif q.limit == 0 then
    window = 0
  elseif remaining == 0 then
    window = trail_wait(x, q, q.limit - 1)
  elseif q.log == 1 then
    local number, start, units = x.gone
    repeat
      number = number + 1
      start, units = trail_entry(x, number)
    until not start or units > 0
    window = start and math.max(start + q.period - now, 0) or q.period
  else
    window = math.max(x.start + q.grain - now, 0)
  end
  return remaining, reset, window
end

-- 4 decide: whether the quota allows it. `x.told` is the answer, `x.writes` whether anything is to be written.
local function trail(x, q)
  trail_view(x, q)
  local cost, units, retry = q.cost, 0, 0
  local ok = x.used + cost <= q.bound
  if ok then
    units = math.max(math.min(cost, q.most - x.used), 0)
    trail_add(x, units)
    x.drop, x.total = x.gone, x.counted
  else
    local add = 0
    if q.count_denied == 1 then
      local there = 0
      if q.log ~= 1 and x.newest == x.start then there = x.newest_units end
      add = math.max(math.min(cost, q.limit - there), 0)
    end
    if q.count_denied == 1 then
      trail_add(x, add)
      x.total = x.counted
      if q.log == 1 then
        local keep = math.max(q.limit, math.min(x.counted - add, q.most))
        local over = x.total - keep
        if over > 0 then x.total = keep end
        while over > 0 do
          local _, held = trail_entry(x, x.gone + 1)
          if not held then break end
          if held <= over then
            x.gone, over = x.gone + 1, over - held
          else
            x.cut_at, x.cut, over = x.gone + 1, over, 0
          end
        end
        if x.newest_units and x.newest_units > x.total then x.newest_units = x.total end
      end
      x.drop = x.gone
      -- The wait that is told counts this refusal too.
      trail_view(x, q)
    else
      x.drop = x.gone
      x.total = x.counted
    end
    retry = -1
    if cost <= q.limit then retry = trail_wait(x, q, q.limit - cost) end
  end
  x.writes = x.moved and cost > 0 or x.add > 0
  local remaining, reset, window = trail_describe(x, q, retry)
  x.told = pack('<BBdddddd', 2, ok and 1 or 0, remaining, reset, window, retry, ok and units or 0, x.start)
  return ok
end

-- The state that a key has in this list; nothing if there is none, or it is garbled.
local function trail_load(key, first, q)
  local x = {
    key = key, entry = q.entry, entry_size = q.size, starts = {}, units = {}, have = 0, all = true, total = 0,
    gone = 0, cut = 0, cut_at = 0, add = 0,
  }
  local found = #first
  if found < 2 then return x end
  for at = 2, found do
    if #first[at] ~= q.size then return x, true end
    x.starts[at - 1], x.units[at - 1] = unpack(q.entry, first[at])
  end
  x.have, x.all = found - 1, found < 4
  local newest = first[found]
  if not x.all then newest = redis.call('LINDEX', key, -1) end
  if #newest ~= q.size then return x, true end
  x.newest, x.newest_units, x.total = unpack(q.entry, newest)
  if not (x.newest >= 0 and x.newest < 9007199254740992 and x.newest_units >= 0 and x.total >= x.newest_units) then
    x.starts, x.units, x.have, x.all, x.total, x.newest = {}, {}, 0, true, 0, nil
    return x, true
  end
  x.last = x.newest
  return x
end

-- Writes what `trail` has decided.
local function trail_store(x, q, head)
  local key, left = x.key, math.max((x.newest or now) + q.life - now, 0)
  left = (left - left % 1000) / 1000 + longer
  -- Without the right to do this nothing may be written, since it would stay for ever.
  redis.call('PEXPIRE', key, left)
  if x.moved or x.fresh then
    -- What is deleted cannot be written again where a cluster moves its slot: so what is new goes behind what is old. A text
    -- has to be deleted; then this looks for what is not there, which such a slot refuses, before anything is done.
    local old = redis.pcall('LLEN', key)
    if type(old) == 'table' then
      redis.call('LLEN', key .. '+')
      redis.call('DEL', key)
      old = 0
    end
    x.all = true
    local list, sum, number = {head}, 0, x.drop
    while true do
      number = number + 1
      local start, units = trail_entry(x, number)
      if not start then break end
      if units > 0 then
        sum = sum + units
        list[#list + 1] = pack(q.entry, start, units, sum)
      end
      if #list == 500 then
        redis.call('RPUSH', key, _G.unpack(list))
        list = {}
      end
    end
    if sum == 0 then
      redis.call('DEL', key)
      return
    end
    if #list > 0 then redis.call('RPUSH', key, _G.unpack(list)) end
    if old > 0 then redis.call('LTRIM', key, old, -1) end
  else
    if x.drop > 0 then
      local gone = redis.call('LINDEX', key, x.drop)
      redis.call('LSET', key, x.drop, head)
      local done = redis.pcall('LTRIM', key, x.drop, -1)
      if done.err then
        redis.call('LSET', key, x.drop, gone)
        error(done, 0)
      end
    end
    if x.cut > 0 then
      local start, units = trail_entry(x, x.cut_at)
      redis.call('LSET', key, 1, pack(q.entry, start, units, 0))
    end
    local newest = pack(q.entry, x.newest, x.newest_units, x.total)
    if x.newest == x.last then
      redis.call('LSET', key, -1, newest)
    elseif x.last then
      redis.call('RPUSH', key, newest)
    else
      redis.call('RPUSH', key, head, newest)
    end
  end
  redis.call('PEXPIRE', key, left)
end
