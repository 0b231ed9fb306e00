-- Twin of places.rs: the units that each holder has of a key.
--
-- 1 The value: the head, the sum of all units, the earliest and the latest instant at which a row lapses, and a row for
--   each holder: its number, its epoch, its units, the instant at which the row lapses, and how often it was reset. The
--   earliest instant may be too early. Then all rows are looked at, and it is set right by the next write.
-- 2 Parameters: the cost, the limit, 1 if the charge is forced; the holder, the number of resets that it knows, its
--   epoch, the units that it held when that epoch began, and 1 if its row has to stay. A call that finds no row, or one
--   of an earlier epoch, sets the row to these units first. A call of an earlier epoch than the row's is refused.
--
-- Returns whether the charge is allowed, the answer, whether the holder's row has to be written even if nothing is
-- taken, its units after the call if nothing is taken and if all is, and the rest for places_write. If the call is
-- refused, returns nothing and the row's resets and epoch. If the value is not one of this version, returns nothing.
local function places(pack, unpack, now, value, head, verb, cost, limit, force, holder, resets, epoch, base, keep)
  local longest, rows, sum, earliest, latest = 86400000000, '', 0, 9007199254740992, 0
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
          sum = sum + units
          left[#left + 1] = pack('<ddddI4', of, began, units, lapses, times)
        end
      end
      rows = table.concat(left)
    end
  end

  local name = pack('<d', holder)
  local place = string.find(rows, name, 1, true)
  while place and place % 36 ~= 1 do place = string.find(rows, name, place + 1, true) end
  local before, units, moved = 0, base, base > 0 or keep == 1
  if place then
    local _, began, has, _, times = unpack('<ddddI4', rows, place)
    if verb ~= 2 and (times > resets or times == resets and began > epoch) then
      return nil, pack('<I4d', times, began)
    end
    before, moved = has, times ~= resets or began ~= epoch
    if verb == 2 or not moved then units = has end
  end
  sum = sum - before + units

  if verb == 3 then
    local left = units - cost
    if left < 0 then left = 0 end
    local told = '\5'
    if not place and (base > 0 or cost > 0) then told = '\9' end
    return true, told, true, left, left, rows, place, sum - units, earliest, latest
  end
  local taken, free = cost, limit - sum
  if free < 0 then free = 0 end
  local ok, notes = cost <= free or force == 1, 0
  if not place then
    notes = 2
    if cost > 0 and ok and #rows >= 9216 then ok, taken, notes = force == 1, 0, 3 end
  end
  if taken > 1099511627774 - sum then taken = 1099511627774 - sum end
  if taken < 0 then taken = 0 end
  return ok, pack('<BdB', 7, sum, notes), moved, units, units + taken, rows, place, sum - units, earliest, latest
end

-- Writes the holder's row with `units`. A row of no units is removed, unless `keep` is 1 or its absence would say
-- something else. Returns Redis' error, if there is one.
local function places_write(
  try, pack, now, longer, key, head, holder, resets, epoch, base, lapse, keep, units, rows, place, others, earliest, latest
)
  local row, done = '', nil
  if units > 0 or keep == 1 or base > 0 then
    local lapses = now + lapse
    row = pack('<ddddI4', holder, epoch, units, lapses, resets)
    if lapses < earliest then earliest = lapses end
    if lapses > latest then latest = lapses end
  end
  if place then
    rows = string.sub(rows, 1, place - 1) .. row .. string.sub(rows, place + 36)
  elseif row == '' or #rows >= 9216 then
    return nil
  else
    rows = rows .. row
  end
  if rows == '' then
    done = try('DEL', key)
    return type(done) == 'table' and done
  end
  local left = latest - now
  if left < 0 then left = 0 end
  done = try(
    'PSETEX', key, (left - left % 1000) / 1000 + longer, head .. pack('<ddd', others + units, earliest, latest) .. rows
  )
  return done.err and done
end
