-- Reads a lone charge of a bucket, a window or a sliding window, and its state. Most calls take
-- one. It is decided before Redis makes the functions for everything else, and only the numbers that
-- these algorithms have are unpacked. The bench `redis` shows the server's time in its case `server`.
--
-- `lone` is the kind of the state. It is nil if the call is another one, or if the value is not this
-- quota's. The rest of the script then decides.
local lone, operation, layout, head, value, at, n, m, a, b, c, d, e, f, g, h, i, j
if #ARGV[1] > 17 then
  local count, width, length, size, mode, place, own
  operation, count, width, length, lone, layout, head, size, mode, a, b, c, place =
    unpack('<BI2I2I4BBc0Bc0BBddd', ARGV[1], 9)
  -- A charge that depends on the refusal of another one has a mode above 2.
  if lone > 5 and lone ~= 11 or lone == 3 or operation > 2 or mode > 2 or count * width ~= 1 or length + 17 ~= #ARGV[1] then
    lone = nil
  else
    value, d, e, f, g = try('GET', KEYS[1]), 1, 0, 0, 0
    if lone == 11 then
      d, e, f, g, h, i, j = unpack('<ddddddd', ARGV[1], place)
      if now < h or now >= i then return pack('<c8dB', ARGV[1], now, 10) end
    elseif lone > 1 then
      d, e, f, g = unpack('<dddd', ARGV[1], place)
    end
    if not value then
      at, n, m = 0, 0, 0
    elseif #value == size then
      own, at, n, m = unpack(layout, value)
      if not (own == head and at >= 0 and at < 9007199254740992 and n >= 0 and n < 9007199254740992) then lone = nil end
    else
      lone = nil
    end
  end
end
