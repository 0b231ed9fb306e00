-- The driver of one algorithm whose state is a few numbers, for charges that need nothing wide and nothing converted.
-- Before it stand FORM and FOUND, and the algorithm's function as `decide`.
--
-- One charge: KEYS[1], its form in ARGV[1], perhaps the time in ARGV[2].
-- Several requests: ARGV[1] lists them, see `encode.rs`, and the forms are from ARGV[3] on.
-- The reply is the time, and for each request what was found, or why nothing was done.

local MOST = 9007199254740992 -- what is not below it is garbled

-- Why nothing is done with a value that is not as it should be.
local function refuse(value)
  if type(value) == 'table' then
    if string.find(value.err, 'WRONGTYPE', 1, true) then return '\3' end
    return pack('<BI2c0', 5, #value.err, value.err)
  end
  local kind = byte(value, 1) or 0
  if kind > 144 and kind < 152 then return '\3' end -- ours, of another quota
  return '\4'
end

-- Finds one charge's state, decides and writes.
local function one(key, layout, head, size, mode, a, b, c, d, e, f, g)
  local value = try('GET', key)
  local at, n, m = 0
  if value then
    local found
    if #value == size then found, at, n, m = unpack(layout, value) end
    if found ~= head then return refuse(value) end
    if not (at >= 0 and at < MOST and (not n or n >= 0 and n < MOST)) then at, n, m, value = 0, nil, nil, false end
  end
  if mode > 0 then
    local _, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g)
    if to then
      local left, done = to - now
      if to >= 0 then
        done = try('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(layout, head, to, p, q))
      else
        done = try('DEL', key)
      end
      if type(done) == 'table' and done.err then return pack('<BI2c0', 5, #done.err, done.err) end
    end
  end
  if value then return pack(FOUND, 1, at, n, m) end
  return '\0'
end

local forms = ARGV
if not forms[3] then return pack('<d', now) .. one(KEYS[1], unpack(FORM, forms[1])) end

local list, place, key = forms[1], 1, 0
local reply = {pack('<d', now)}
while place <= #list do
  local form, count
  form, count, place = unpack('<I2I2', list, place)
  if form > 0 then
    -- Requests of one charge each, all of this form.
    local layout, head, size, mode, a, b, c, d, e, f, g = unpack(FORM, forms[form])
    for at = key + 1, key + count do
      reply[#reply + 1] = one(KEYS[at], layout, head, size, mode, a, b, c, d, e, f, g)
    end
  else
    -- A request of several charges: all are decided, then written.
    local allowed, why, told, writes, last = true, nil, '', {}, 0
    for charge = 1, count do
      form, place = unpack('<I2', list, place)
      local layout, head, size, mode, a, b, c, d, e, f, g = unpack(FORM, forms[form])
      local value = try('GET', KEYS[key + charge])
      local at, n, m = 0
      if value then
        local found
        if #value == size then found, at, n, m = unpack(layout, value) end
        if found ~= head then
          why = why or refuse(value)
          at, n, m = 0
        elseif not (at >= 0 and at < MOST and (not n or n >= 0 and n < MOST)) then
          at, n, m, value = 0, nil, nil, false
        end
      end
      if value and not why then told = told .. pack(FOUND, 1, at, n, m) else told = told .. '\0' end
      if mode > 0 then
        local ok, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g)
        local refused = mode == 1 and not ok
        if refused then allowed = false end
        if to then
          last = last + 1
          writes[last] = {KEYS[key + charge], to, to >= 0 and pack(layout, head, to, p, q), refused}
        end
      end
    end
    for at = 1, last do
      local write = writes[at]
      if not why and (allowed or write[4]) then
        local left, done = write[2] - now
        if write[3] then
          done = try('PSETEX', write[1], (left - left % 1000) / 1000 + longer, write[3])
        else
          done = try('DEL', write[1])
        end
        if type(done) == 'table' and done.err then why = pack('<BI2c0', 5, #done.err, done.err) end
      end
    end
    reply[#reply + 1] = why or told
  end
  key = key + count
end
return table.concat(reply)
