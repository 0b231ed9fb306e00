-- The usual case: a key has no value, or one that was written under the asked quota. All other
-- cases are general.lua's.
--
-- These functions share no local variable with the script around them. Redis creates them anew with
-- each call, and each shared variable costs about 400 instructions then (bench "server").

-- The form of a charge: kind, layout and head of the value, its size, mode, ten numbers, and what
-- general.lua needs.
local FORM = '<BBc0Bc0BBddddddddddI2c0'

-- Returns the answer and the state that was found. Returns nothing if the case is not the usual
-- one.
local function usual_state(try, unpack, name, layout, head, size)
  local value = try('GET', name)
  if not value then return '\0', 0, 0, 0 end
  if #value ~= size then return nil end
  local own, at, n, m = unpack(layout, value) -- what a layout lacks is not looked at
  if own ~= head or not (at >= 0 and at < 9007199254740992 and n >= 0 and n < 9007199254740992) then return nil end
  return '\1' .. string.sub(value, #head + 1), at, n, m
end

-- Writes a state that ends at `to`, or deletes it if `to` is negative. Returns an answer only if
-- Redis refuses.
local function write_state(try, pack, now, longer, name, layout, head, at, to, n, m)
  local done
  if to < 0 then
    done = try('DEL', name)
  elseif to == at and at > 0 then
    done = try('SET', name, pack(layout, head, to, n, m), 'KEEPTTL') -- half as dear as setting the time again
  else
    local left = to - now
    done = try('PSETEX', name, (left - left % 1000) / 1000 + longer, pack(layout, head, to, n, m))
  end
  if type(done) ~= 'table' or not done.err then return nil end
  local words = string.sub(done.err, 1, 1000)
  return pack('<BI2c0', 4, #words, words)
end

-- Decides several charges and writes them if all are allowed. Returns nothing, and has written
-- nothing, if the case of one of them is not the usual one. `forms` keeps the forms of the run.
local function usual_set(try, pack, unpack, now, longer, DECIDE, KEYS, FORM, key, program, place, width, forms)
  local states, answers, allowed = {}, {}, true
  for number = 1, width do
    local form = forms[number]
    if not form then
      form = {unpack(FORM, program, place)}
      forms[number] = form
    end
    place = form[17]
    local decide = DECIDE[form[1]]
    local answer, at, n, m = usual_state(try, unpack, KEYS[key + number], form[2], form[3], form[4])
    if not answer then return nil end
    local ok, to, p, r =
      decide(now, at, n, m, form[6], form[7], form[8], form[9], form[10], form[11], form[12])
    if not ok and form[5] == 1 then allowed = false end
    states[number], answers[number] = {at, ok, to, p, r}, answer
  end
  for number = 1, width do
    local form, state = forms[number], states[number]
    local at, ok, to = state[1], state[2], state[3]
    -- A refused charge that is written all the same counts its refusals.
    if to and (allowed or form[5] == 1 and not ok) then
      local name = KEYS[key + number]
      local failed = write_state(try, pack, now, longer, name, form[2], form[3], at, to, state[4], state[5])
      if failed then return failed, place end
    end
  end
  return table.concat(answers), place
end
