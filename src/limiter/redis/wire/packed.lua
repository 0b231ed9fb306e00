-- Values that hold the states of several quotas: 152, how many, the heads of all, and the states of all, in their order.

local WIDTH = {1, 2, 2, 2, 3} -- numbers of a state

-- The states in a value that holds several, each with what it was written under; `list` is given to be filled. Nothing is
-- found in a garbled one; nothing at all is returned if the value is not ours.
local function unpacked(text, list)
  if string.byte(text, 1) ~= 152 then return nil end
  local place = 3
  for at = 1, string.byte(text, 2) or 0 do
    local q, length = quota_of(string.sub(text, place, place + 63))
    if not q or q.kind > 5 then return {} end
    list[at] = {kind = q.kind, head = string.sub(text, place, place + length - 2), at = 0, n = 0, m = 0}
    place = place + length - 1
  end
  local from, size = place, 0
  for _, state in ipairs(list) do size = size + (state.kind == 1 and 8 or 16) end
  if #text ~= place - 1 + size then return {} end
  for _, state in ipairs(list) do
    local layout = STATES[state.kind]
    local at, n, m = unpack(layout, text, from)
    from = from + (state.kind == 1 and 8 or 16)
    if WIDTH[state.kind] < 2 then n = 0 end
    if WIDTH[state.kind] < 3 then m = 0 end
    if at >= 0 and at < MOST and n >= 0 and n < MOST then state.at, state.n, state.m = at, n, m end
  end
  return list
end

-- Reads a value that holds several states; then why not.
local function read_packed(key)
  local text, list, why = read(key, 1)
  if list then why = FOREIGN end
  if why then return nil, why end
  local found = {}
  if text then found = unpacked(text, found) end
  if not found then return nil, FOREIGN end
  return {key = key, found = found, text = text}
end

-- The state of a quota among them.
local function state_of(states, q)
  for _, state in ipairs(states.found) do
    if state.head == q.head then return state end
  end
  local state = {kind = q.kind, head = q.head, at = 0, n = 0, m = 0}
  states.found[#states.found + 1] = state
  return state
end

-- Writes the states that these charges are of, and then the others that are not over yet: they are of another rule of the
-- name, or of this one as it was.
local function write_packed(states, charges)
  local heads, values, last, seen = {}, {}, 0, {}
  local function add(state)
    if seen[state] or #heads == 255 then return end
    seen[state] = true
    if state.at > last then last = state.at end
    heads[#heads + 1] = state.head
    values[#values + 1] = pack(STATES[state.kind], state.at, state.n, state.m)
  end
  for _, q in ipairs(charges) do add(state_of(states, q)) end
  for _, state in ipairs(states.found) do
    if state.at >= now then add(state) end
  end
  if last < now then
    redis.call('DEL', states.key)
    return
  end
  local left = last - now
  local value = pack('<BB', 152, #heads) .. table.concat(heads) .. table.concat(values)
  redis.call('PSETEX', states.key, (left - left % 1000) / 1000 + longer, value)
end

local function set_state(state, to, n, m)
  if not to or to < 0 then to, n, m = 0, 0, 0 end
  state.at, state.n, state.m = to, n or 0, m or 0
end

-- Several charges whose states are in one value, as one.
look_packed = function(key, q)
  local states, why = read_packed(key)
  if not states then return nil, why end
  local y = {states = states, q = q, charges = {}}
  for at, charge in ipairs(q.charges) do
    local state = state_of(states, charge)
    y.charges[at] = {q = charge, state = state, at = state.at, n = state.n, m = state.m, there = state.at > 0 or state.n > 0}
  end
  return y
end

decided_packed = function(y)
  local refused, told = false, {'\0'}
  y.denials = {}
  for at, charge in ipairs(y.charges) do
    if decided(charge) then refused = true end
    if charge.q.mode > 0 then y.denials[#y.denials + 1] = charge.denied and true or false end
    if y.states.text then
      told[1] = '\1'
      told[at + 1] = pack(STATES[charge.q.kind], charge.at, charge.n, charge.m)
    end
  end
  y.told = table.concat(told)
  return refused
end

write_charges = function(y, taken)
  local any = false
  for _, charge in ipairs(y.charges) do
    if charge.writes and charge.q.mode > 0 and (taken or charge.refused) then
      any = true
      set_state(charge.state, charge.to, charge.p, charge.q2)
    end
  end
  if any then write_packed(y.states, y.q.charges) end
end

-- Gives back to one of the states of a value, or forgets it.
change_packed = function(key, q)
  local states, why = read_packed(key)
  if not states then return why end
  local state = state_of(states, q)
  if state.at == 0 and state.n == 0 then return '\6' end
  if q.mode == 5 then
    set_state(state)
  else
    local to, p, m = refund_pair(q, q.refund, state.at, state.n, state.m)
    if not to then return '\6' end
    set_state(state, to, p, m)
  end
  write_packed(states, {})
  return '\6'
end
