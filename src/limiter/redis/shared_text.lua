-- Loads or swaps the text that all processes share. KEYS[2] has it, after 16 bytes of its version. KEYS[1] has the
-- version alone, so that a load of an unchanged text does not copy the text into the script.
--
-- ARGV[1] is the version that the caller knows, or nothing. With ARGV[2], the next value, the text is
-- replaced if it has that version. Returns `=` if the version was the known one. Otherwise it returns
-- `!` and, for a load, the value.
local known, next = ARGV[1], ARGV[2]
if not next and known ~= '' and redis.call('GET', KEYS[1]) == known then return '=' end
local value = redis.call('GET', KEYS[2]) or ''
if string.sub(value, 1, 16) ~= known then return next and '!' or '!' .. value end
if next then
  redis.call('SET', KEYS[1], string.sub(next, 1, 16))
  redis.call('SET', KEYS[2], next)
end
return '='
