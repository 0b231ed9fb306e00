-- The driver of requests of one shape, see `shape.rs`, for charges that need nothing wide and nothing converted.
--
-- One request: its keys, its form in ARGV[1], perhaps the time in ARGV[2].
-- Several: ARGV[1] lists them, see `call` in `mod.rs`, and the forms are from ARGV[3] on.
-- The reply is the time, and for each request what was found, or why nothing was done.

local MOST = 9007199254740992 -- what is not below it is garbled
local KEYS, forms = KEYS, ARGV
local form, count, place, key, list, reply = 1, 1, 1, 0
if not alone then list, reply = forms[1], {pack('<d', now)} end

while alone or place <= #list do
  if not alone then form, count, place = unpack('<I2I2', list, place) end
  FORM
  for _ = 1, count do
    BODY
    if bad then
      -- Not as it should be: a value, or what Redis answered.
      told = '\4'
      if type(bad) == 'table' then
        told = string.find(bad.err, 'WRONGTYPE', 1, true) and '\3' or pack('<BI2c0', 5, #bad.err, bad.err)
      else
        local kind = string.byte(bad, 1) or 0
        if kind > 144 and kind < 155 then told = '\3' end -- ours, of another quota
      end
    end
    if alone then return pack('<d', now) .. told end
    reply[#reply + 1] = told
    key = key + UNITS
  end
end
return table.concat(reply)
