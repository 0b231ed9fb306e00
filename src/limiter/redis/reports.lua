-- Keeps the report of a process for a time, or returns all reports. Each of KEYS is a place: 16 bytes of the process, and
-- its report. Another application may have a place, with a value of any type and size: the report there is empty.
--
-- ARGV[1] is what KEYS[1] is to have, and ARGV[2] for how many milliseconds. Returns `=` if it is kept, and `!` if another
-- process has the place. Without them it returns `=`, and each report after its length and a colon.
local report = ARGV[1]
local function find(key)
  local there = redis.pcall('GET', key)
  if type(there) == 'table' or (there and #there > 8016) then return '' end
  return there
end
if report then
  local there = find(KEYS[1])
  if there and string.sub(there, 1, 16) ~= string.sub(report, 1, 16) then return '!' end
  redis.call('PSETEX', KEYS[1], ARGV[2], report)
  return '='
end
local reports = {'='}
for at = 1, #KEYS do
  local there = find(KEYS[at])
  if there then reports[#reports + 1] = #there .. ':' .. there end
end
return table.concat(reports)
