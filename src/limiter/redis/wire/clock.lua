-- What every script begins with: its functions, the time, and whether there is one request and no list of them.
-- ARGV[2], if there and not empty, is the time to go by, in place of the server's. Then states are kept an hour longer,
-- since the server's clock may be ahead of it.
local try, pack, unpack = redis.pcall, struct.pack, struct.unpack
local alone = not ARGV[3]
local now, longer = ARGV[2], 1
if now and now ~= '' then
  now, longer = now + 0, 3600001
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if now > 5680281600000000 then now = 5680281600000000 end
