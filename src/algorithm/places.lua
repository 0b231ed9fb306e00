-- Twin of places.rs: the units that each holder has of a key.
--
-- 1 The value: the head, the sum of all units, the earliest and the latest instant at which a row lapses, and a row for
--   each holder: its number, its epoch, its units, the instant at which the row lapses, and how often it was reset. The
--   earliest instant may be too early. Then all rows are looked at, and it is set right by the next write. In front of
--   these is a row for each holder with a request in line: the holder's number below 0, the instant since which its
--   first request waits, the cost of that request, the instant at which the row lapses, and the request's number.
-- 2 Parameters: the cost, the limit, 1 if the charge is forced; the holder, the number of resets that it knows, its
--   epoch, the units that it held when that epoch began, and 1 if its row has to stay. A call that finds no row, or one
--   of an earlier epoch, sets the row to these units first. A call of an earlier epoch than the row's is refused.
-- 3 In line: the units that are free are kept for other holders' requests that have waited for longer, and are answered
--   as if they were held. `extra` says from its sixth byte on for how long this request has waited, below 0 if all units
--   are kept for another one of its holder, then its number, and for how many milliseconds its row stays. Without that, it
--   does not wait. In a return, a second byte of `extra` says that no request of the holder is in line any more.
--
-- Returns whether the charge is allowed, the answer, whether the value has to be written even if nothing is taken, the
-- units of the holder's row after the call if nothing is taken and if all is, the rows of requests in line in both
-- cases, and the rest for places_write. If the call is refused, returns nothing and the row's resets and epoch. If the
-- value is not one of this version, returns nothing.
local function places(
  pack, unpack, now, value, head, operation, cost, limit, force, holder, resets, epoch, base, keep, extra
)
  local longest, rows, sum, earliest, latest = 86400000000, '', 0, 9007199254740992, 0
  local line, own = '', nil
  if value then
    if string.sub(value, 1, 1) ~= head or #value < 25 or #value % 36 ~= 25 then return nil end
    sum, earliest, latest = unpack('<ddd', value, 2)
    rows = string.sub(value, 26)
    if not (now < earliest and latest - now <= longest) then
      local left = {}
      sum, earliest, latest = 0, 9007199254740992, 0
      for place = 1, #rows, 36 do
        local of, began, units, lapses, times = unpack('<ddddI4', rows, place)
        if lapses > now then
          if lapses - now > longest then lapses = now + longest end -- the clock stepped back
          if lapses < earliest then earliest = lapses end
          if lapses > latest then latest = lapses end
          if of > 0 then sum = sum + units end
          left[#left + 1] = pack('<ddddI4', of, began, units, lapses, times)
        end
      end
      rows = table.concat(left)
    end
    -- The sign of a number is in its last byte.
    local ahead = 0
    while #rows > ahead and string.byte(rows, ahead + 8) > 127 do ahead = ahead + 36 end
    if ahead > 0 then line, rows = string.sub(rows, 1, ahead), string.sub(rows, ahead + 1) end
  end

  local name = pack('<d', holder)
  local place = string.find(rows, name, 1, true)
  while place and place % 36 ~= 1 do place = string.find(rows, name, place + 1, true) end
  local before, units, moved = 0, base, base > 0 or keep == 1
  if place then
    local _, began, has, _, times = unpack('<ddddI4', rows, place)
    if operation ~= 2 and (times > resets or times == resets and began > epoch) then
      return nil, pack('<I4d', times, began)
    end
    before, moved = has, times ~= resets or began ~= epoch
    if operation == 2 or not moved then units = has end
  end
  sum = sum - before + units

  if operation == 3 then
    local left = units - cost
    if left < 0 then left = 0 end
    local told = '\5'
    if not place and (base > 0 or cost > 0) then told = '\9' end
    if #extra > 1 then
      for at = 1, #line, 36 do
        if unpack('<d', line, at) == -holder then
          line = string.sub(line, 1, at - 1) .. string.sub(line, at + 36)
          break
        end
      end
    end
    return true, told, true, left, left, line, line, rows, place, sum - units, earliest, latest
  end

  local waited, number, stays, since = 0, 0, 0, now + 1
  if #extra > 5 then
    waited, number, stays = unpack('<dI4I4', extra, 6)
    if stays > 0 then since = now - waited end
  end
  for at = 1, #line, 36 do
    local of, first, _, _, who = unpack('<ddddI4', line, at)
    if of == -holder then
      own = at
      if who == number and stays > 0 then since = first end
    end
  end
  local shown = sum
  for at = 1, #line, 36 do
    local of, first, needs = unpack('<ddd', line, at)
    if of ~= -holder and first < since then shown = shown + needs end
  end
  if waited < 0 or shown > limit then shown = limit end
  if shown < sum or force == 1 then shown = sum end

  local taken, free = cost, limit - shown
  if free < 0 then free = 0 end
  local ok, notes = cost <= free or force == 1, 0
  if not place then
    notes = 2
    if cost > 0 and ok and #rows >= 9216 then ok, taken, notes = force == 1, 0, 3 end
  end
  local without = line
  if own and stays > 0 then without = string.sub(line, 1, own - 1) .. string.sub(line, own + 36) end
  if stays > 0 and not ok and #without < 4608 then
    local lapses = now + stays * 1000
    line, moved = without .. pack('<ddddI4', -holder, since, cost, lapses, number), true
    if lapses < earliest then earliest = lapses end
    if lapses > latest then latest = lapses end
  end
  if taken > 1099511627774 - sum then taken = 1099511627774 - sum end
  if taken < 0 then taken = 0 end
  return ok, pack('<BdB', 7, shown, notes), moved, units, units + taken, line, without, rows, place, sum - units, earliest, latest
end

-- Writes the holder's row with `units`, and the rows of requests in line. A row of no units is removed, unless `keep` is 1
-- or its absence would say something else. Returns Redis' error, if there is one.
local function places_write(
  try, pack, now, longer, key, head, holder, resets, epoch, base, lapse, keep, units,
  line, rows, place, others, earliest, latest
)
  local row, sum, done = '', others + units, nil
  if units > 0 or keep == 1 or base > 0 then
    local lapses = now + lapse
    row = pack('<ddddI4', holder, epoch, units, lapses, resets)
    if lapses < earliest then earliest = lapses end
    if lapses > latest then latest = lapses end
  end
  if place then
    rows = string.sub(rows, 1, place - 1) .. row .. string.sub(rows, place + 36)
  elseif row ~= '' and #rows < 9216 then
    rows = rows .. row
  else
    sum = others
  end
  rows = line .. rows
  if rows == '' then
    done = try('DEL', key)
    return type(done) == 'table' and done
  end
  local left = latest - now
  if left < 0 then left = 0 end
  done = try(
    'PSETEX', key, (left - left % 1000) / 1000 + longer, head .. pack('<ddd', sum, earliest, latest) .. rows
  )
  return done.err and done
end
