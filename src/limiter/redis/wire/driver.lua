-- The requests of a call, in their order.
local DECIDE = {gcra, gcra, step_bucket, fixed_window, sliding_window}
local KEYS, program, place, key, general = KEYS, ARGV[1], 1, 0
local reply = {pack('<d', now)}

while place <= #program do
  local verb, count, width, from = unpack('<BI2I2', program, place)
  local is_one, forms = verb == 0 and width == 1, {}
  local kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, _, after
  if is_one then
    kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, _, after = unpack(FORM, program, from)
  end
  for _ = 1, count do
    local name, answer = KEYS[key + 1]
    place = after
    if is_one and kind > 5 then
      answer = trail_plain(
        try, pack, unpack, now, longer, name, layout, head, size, a, b, c, d, e, f, g, h, i, j
      )
    elseif is_one then
      local found, at, n, m = usual_state(try, unpack, name, layout, head, size)
      if found then
        local _, to, p, r = DECIDE[kind](now, at, n, m, a, b, c, d, e, f, g)
        answer = to and write_state(try, pack, now, longer, name, layout, head, at, to, p, r) or found
      end
    elseif verb == 0 then
      answer, place = usual_set(try, pack, unpack, now, longer, DECIDE, KEYS, FORM, key, program, from, width, forms)
    end
    if not answer then
      general = general or make_general(try, pack, unpack, now, longer, program, FORM)
      answer, place = general(verb, key, width, from)
    end
    reply[#reply + 1] = answer
    key = key + width
  end
end
return table.concat(reply)
