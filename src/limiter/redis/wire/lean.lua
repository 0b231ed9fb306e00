-- The driver of one algorithm whose state is a few numbers, for charges that need nothing wide and nothing converted.
-- Before it stand FORM, FOUND and LONE, the layouts of a form and of answers, and the algorithm's function as `decide`.
--
-- One charge: KEYS[1], its form in ARGV[1], perhaps the time in ARGV[2].
-- Several requests: ARGV[1] lists them, see `call` in `mod.rs`, and the forms are from ARGV[3] on.
-- The reply is the time, and for each request what was found, or why nothing was done.
--
-- A lone charge takes the same way as a run of them, and meets no table and no function that it does not need: each would
-- cost it some 60 ns.

local MOST = 9007199254740992 -- what is not below it is garbled
local KEYS, forms = KEYS, ARGV
local lone = not forms[3]
local form, count, place, key, list, reply = 1, 1, 1, 0
if not lone then list, reply = forms[1], {pack('<d', now)} end

-- Why nothing is done, with a value that is not as it should be or with what Redis answered.
local function refuse(value)
  if type(value) == 'table' then
    if string.find(value.err, 'WRONGTYPE', 1, true) then return '\3' end
    return pack('<BI2c0', 5, #value.err, value.err)
  end
  local kind = string.byte(value, 1) or 0
  if kind > 144 and kind < 152 then return '\3' end -- ours, of another quota
  return '\4'
end

while lone or place <= #list do
  if not lone then form, count, place = unpack('<I2I2', list, place) end
  if form > 0 then
    -- Requests of one charge each, all of this form.
    local layout, head, size, mode, a, b, c, d, e, f, g = unpack(FORM, forms[form])
    for number = key + 1, key + count do
      local name, why = KEYS[number]
      local value = try('GET', name)
      local at, n, m = 0
      if value then
        local found
        if #value == size then found, at, n, m = unpack(layout, value) end
        if found ~= head then
          why = refuse(value)
        elseif not (at >= 0 and at < MOST and (not n or n >= 0 and n < MOST)) then
          at, n, m, value = 0, nil, nil, false
        end
      end
      if not why and mode > 0 then
        local _, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g)
        if to then
          local left, done = to - now
          if to >= 0 then
            done = try('PSETEX', name, (left - left % 1000) / 1000 + longer, pack(layout, head, to, p, q))
            if done.err then why = refuse(done) end
          else
            try('DEL', name)
          end
        end
      end
      if lone then
        if why then return pack('<d', now) .. why end
        if value then return pack(LONE, now, 1, at, n, m) end
        return pack('<dB', now, 0)
      end
      reply[#reply + 1] = why or value and pack(FOUND, 1, at, n, m) or '\0'
    end
  else
    -- A request of several charges: all are decided, then written.
    local allowed, why, told, writes, last = true, nil, '', {}, 0
    for charge = 1, count do
      form, place = unpack('<I2', list, place)
      local layout, head, size, mode, a, b, c, d, e, f, g = unpack(FORM, forms[form])
      local name = KEYS[key + charge]
      local value = try('GET', name)
      local at, n, m = 0
      if value then
        local found
        if #value == size then found, at, n, m = unpack(layout, value) end
        if found ~= head then
          why = why or refuse(value)
          at, n, m = 0, nil, nil
        elseif not (at >= 0 and at < MOST and (not n or n >= 0 and n < MOST)) then
          at, n, m, value = 0, nil, nil, false
        end
      end
      told = told .. (value and not why and pack(FOUND, 1, at, n, m) or '\0')
      if mode > 0 then
        local ok, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g)
        local refused = mode == 1 and not ok
        if refused then allowed = false end
        if to then
          last = last + 1
          writes[last] = {name, to, to >= 0 and pack(layout, head, to, p, q), refused}
        end
      end
    end
    for number = 1, last do
      local write = writes[number]
      if not why and (allowed or write[4]) then
        if write[3] then
          local left = write[2] - now
          local done = try('PSETEX', write[1], (left - left % 1000) / 1000 + longer, write[3])
          if done.err then why = refuse(done) end
        else
          try('DEL', write[1])
        end
      end
    end
    reply[#reply + 1] = why or told
  end
  key = key + count
end
return table.concat(reply)
