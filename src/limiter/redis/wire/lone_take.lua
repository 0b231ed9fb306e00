-- Decides the lone charge, writes its state, and answers. If the command fails, nothing was written,
-- and the rest of the script tries again and reports the failure.
local _, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g, h, i, j)
local done = true
if to and operation == 1 then
  if to == at and at > 0 then
    done = try('SET', KEYS[1], pack(layout, head, to, p, q), 'KEEPTTL').ok -- half as dear as setting the time again
  else
    local left = to - now
    done = left >= 0 and try('PSETEX', KEYS[1], (left - left % 1000) / 1000 + longer, pack(layout, head, to, p, q)).ok
  end
end
if done then
  if not value then return pack('<c8dB', ARGV[1], now, 0) end
  if lone == 1 then return pack('<c8dBd', ARGV[1], now, 1, at) end
  if lone == 5 then return pack('<c8dBdI4I4', ARGV[1], now, 1, at, n, m) end
  if lone == 11 then return pack('<c8dBddd', ARGV[1], now, 1, at, n, m) end
  return pack('<c8dBdd', ARGV[1], now, 1, at, n)
end
