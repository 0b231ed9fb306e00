-- The beginning of the script: the functions of Redis that it uses, and the time.
--
-- ARGV[1] is the call's number and the program (see wire/mod.rs). ARGV[2] is the time, if the client
-- gives it. States then stay an hour longer, because the server's clock may be ahead of the
-- client's.
local try, pack, unpack = redis.pcall, struct.pack, struct.unpack
local now, longer = ARGV[2], 1
if now then
  now, longer = now + 0, 3600001
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if now > 5680281600000000 then now = 5680281600000000 end
