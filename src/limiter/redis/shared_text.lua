-- Loads or swaps the text that all processes share. KEYS[1] has it, after 16 bytes of its version.
--
-- ARGV[1] is the version that the caller knows, or nothing. With ARGV[2], the next value, the text is
-- replaced if it has that version. Returns `=` if the version was the known one. Otherwise it returns
-- `!` and, for a load, the value.
local value = redis.call('GET', KEYS[1]) or ''
local known = string.sub(value, 1, 16) == ARGV[1]
if known and ARGV[2] then redis.call('SET', KEYS[1], ARGV[2]) end
if known then return '=' end
if ARGV[2] then return '!' end
return '!' .. value
