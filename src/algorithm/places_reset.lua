-- Sets the units of all holders of a key to 0. Requests in line stay. The rows stay until they lapse, and count the
-- resets, so that calls and places of before are known. Returns the answer, or nothing and the error.
local function places_reset(try, pack, unpack, now, longer, key)
  local value, done = try('GET', key), nil
  if not value then return '\5' end
  local rows, latest, earliest = {}, 0, 9007199254740992
  if type(value) == 'string' and string.byte(value) == 170 and #value % 36 == 25 then
    for place = 26, #value, 36 do
      local of, began, units, lapses, times = unpack('<ddddI4', value, place)
      if lapses > now then
        if lapses - now > 86400000000 then lapses = now + 86400000000 end -- the clock stepped back
        if lapses < earliest then earliest = lapses end
        if lapses > latest then latest = lapses end
        if of > 0 then units, times = 0, (times + 1) % 4294967296 end
        rows[#rows + 1] = pack('<ddddI4', of, began, units, lapses, times)
      end
    end
  end
  if #rows == 0 then
    done = try('DEL', key)
    if type(done) == 'table' then return nil, done end
    return '\5'
  end
  local left = latest - now
  done = try(
    'PSETEX', key, (left - left % 1000) / 1000 + longer,
    string.sub(value, 1, 1) .. pack('<ddd', 0, earliest, latest) .. table.concat(rows)
  )
  if done.err then return nil, done end
  return '\5'
end
