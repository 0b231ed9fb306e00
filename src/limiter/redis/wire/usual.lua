-- Charges that depend on no other, of keys that have no value or one that this quota wrote: any
-- number of them if their states are a few numbers, or one of a list. The functions return nothing
-- in every other case, and requests.lua then does the request.
--
-- They share no local variable with the script around them. Redis creates them anew with each call,
-- and each shared variable costs about 400 instructions then (bench "server").

-- The form of a charge: kind, layout and head of the value, its size, mode, ten numbers, and what
-- requests.lua needs.
local FORM = '<BBc0Bc0BBddddddddddI2c0'

-- Returns the answer and the state that was found. Numbers that a layout lacks are not looked at.
local function read_pair(try, unpack, key, layout, head, size)
  local value = try('GET', key)
  if not value then return '\0', 0, 0, 0 end
  if #value ~= size then return nil end
  local own, at, n, m = unpack(layout, value)
  if own ~= head or not (at >= 0 and at < 9007199254740992 and n >= 0 and n < 9007199254740992) then return nil end
  return '\1' .. string.sub(value, #head + 1), at, n, m
end

-- Writes a state that ends at `to`, or deletes it if `to` is negative. The state before ended at
-- `at`. Returns the error if Redis refuses.
local function write_pair(try, pack, now, longer, key, layout, head, at, to, n, m)
  local done
  if to < 0 then
    done = try('DEL', key)
  elseif to == at and at > 0 then
    done = try('SET', key, pack(layout, head, to, n, m), 'KEEPTTL') -- half as dear as setting the time again
  else
    local left = to - now
    if left < 0 then left = 0 end -- a refund can leave a state that is over
    done = try('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(layout, head, to, n, m))
  end
  if type(done) == 'table' and done.err then return done end
end

-- Decides several charges and writes them if all are allowed. `forms` keeps the forms of the run.
local function usual_set(
  try, pack, unpack, now, longer, read_pair, write_pair, twin, KEYS, FORM, first, program, place, width, forms
)
  local states, answers, allowed = {}, {}, true
  for number = 1, width do
    local form = forms[number]
    if not form then
      form = {unpack(FORM, program, place)}
      form[16] = twin(form[1]) -- in place of what only requests.lua needs
      forms[number] = form
    end
    place = form[17]
    local answer, at, n, m = read_pair(try, unpack, KEYS[first + number], form[2], form[3], form[4])
    if not answer then return nil end
    local ok, to, p, q = form[16](
      now, at, n, m, form[6], form[7], form[8], form[9], form[10], form[11], form[12], form[13], form[14]
    )
    if not ok and form[5] == 1 then allowed = false end
    states[number], answers[number] = {at, ok, to, p, q}, answer
  end
  for number = 1, width do
    local form, state = forms[number], states[number]
    local at, ok, to = state[1], state[2], state[3]
    -- A refused charge that is written all the same counts its refusals.
    if to and (allowed or form[5] == 1 and not ok) then
      local key = KEYS[first + number]
      local failed = write_pair(try, pack, now, longer, key, form[2], form[3], at, to, state[4], state[5])
      if failed then
        local words = string.sub(failed.err, 1, 1000)
        return pack('<BI2c0', 4, #words, words), place
      end
    end
  end
  return table.concat(answers), place
end

-- Returns the first elements of a list, its newest entry and the units of all entries.
local function read_list(try, unpack, key, layout, head, size)
  local list = try('LRANGE', key, '0', '2')
  local found = #list
  if found == 0 then
    if list.err then return nil end
    return list, nil, nil, 0
  end
  local last = found > 2 and try('LINDEX', key, '-1') or list[found]
  if list[1] ~= head or found < 2 or #list[2] ~= size or #list[found] ~= size or #last ~= size then return nil end
  local newest, units, total = unpack(layout, last)
  if newest >= 0 and newest < 9007199254740992 and units >= 0 and total >= units then return list, newest, units, total end
end
