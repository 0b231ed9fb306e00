-- Returns the commands of the scripts that the user may not run, as ACL SETUSER names them. ARGV[1]
-- is not empty if the scripts ask for the time.
--
-- Each command is run so that it changes nothing: on a key without a state, or with arguments that
-- Redis refuses only after it has checked the rights. Only RPUSH has to make a list, which is
-- deleted at once.
local key, missing = KEYS[1], {}

local function may(name, ...)
  local done = redis.pcall(name, ...)
  local words = type(done) == 'table' and done.err or ''
  -- Up to Redis 7.0 "The user executing the script can't run this command", or "can't access" its
  -- keys; later "ACL failure".
  if not (string.find(words, 'executing the script', 1, true) or string.find(words, 'ACL failure', 1, true)) then
    return true
  end
  missing[#missing + 1] = '+' .. string.lower(name)
end

if ARGV[1] ~= '' then may('TIME') end
may('GET', key)
may('SET', key, '', 'XX', 'KEEPTTL')
may('PSETEX', key, 0, '')
may('LRANGE', key, 0, 0)
may('LINDEX', key, 0)
may('LLEN', key)
may('LSET', key, 0, '')
may('LTRIM', key, 0, 0)
may('RPOP', key)
may('PEXPIRE', key, 1000)
if may('DEL', key) and may('RPUSH', key, '') then redis.pcall('DEL', key) end
return table.concat(missing, ' ')
