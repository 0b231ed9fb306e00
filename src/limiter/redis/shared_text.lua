-- Loads or swaps the text that all processes share. KEYS[1] is a list of its version, of 16 bytes, and the text. So a load
-- of an unchanged text does not copy it into the script, and neither of them can be evicted without the other.
--
-- ARGV[1] is the version that the caller knows, or nothing. With ARGV[2], the next version and text, the text is
-- replaced if it has the known version. Returns `=` if the version was the known one. Otherwise it returns
-- `!` and, for a load, version and text. Another application may have the key: a text that this crate cannot have
-- written counts as empty.
local known, next = ARGV[1], ARGV[2]
local version = redis.call('LINDEX', KEYS[1], 0) or ''
if version ~= known then
  if next then return '!' end
  local text = redis.call('LINDEX', KEYS[1], 1) or ''
  return '!' .. string.sub(version, 1, 16) .. (#text > 1000000 and '' or text)
end
if next then
  redis.call('DEL', KEYS[1])
  redis.call('RPUSH', KEYS[1], string.sub(next, 1, 16), string.sub(next, 17))
end
return '='
