-- Arithmetic beyond 2^53. A number is a list of digits of 24 bits, the lowest first, so that the
-- product of two digits and a carry are exact in a double.
local DIGIT = 16777216

local function digits(number)
  local list = {}
  repeat
    local low = number % DIGIT
    list[#list + 1] = low
    number = (number - low) / DIGIT
  until number == 0
  return list
end

-- Adds a number below 2^53.
local function plus(list, number)
  local sum, carry, at = {}, number, 1
  while list[at] or carry > 0 do
    local low = carry % DIGIT
    local digit = (list[at] or 0) + low
    carry = (carry - low) / DIGIT
    if digit >= DIGIT then digit, carry = digit - DIGIT, carry + 1 end
    sum[at], at = digit, at + 1
  end
  return sum
end

local function times(list, number)
  local product = {0}
  for shift, by in ipairs(digits(number)) do
    local carry = 0
    for at, digit in ipairs(list) do
      local place = at + shift - 1
      local sum = digit * by + (product[place] or 0) + carry
      product[place] = sum % DIGIT
      carry = (sum - product[place]) / DIGIT
    end
    local place = #list + shift
    while carry > 0 do
      local sum = (product[place] or 0) + carry
      product[place] = sum % DIGIT
      carry = (sum - product[place]) / DIGIT
      place = place + 1
    end
    while #product < #list + shift do product[#product + 1] = 0 end
  end
  return product
end

-- Returns the quotient and the rest. The divisor is from 1 to below 2^53. Each step takes as many
-- bits as fit beside it.
local function divide(list, by)
  local bits = 24
  while by * 2 ^ bits > 9007199254740992 do
    bits = bits == 24 and 12 or bits == 12 and 6 or bits == 6 and 3 or 1
  end
  local chunk, quotient, rest = 2 ^ bits, {}, 0
  for at = #list, 1, -1 do
    local digit, whole, unit = list[at], 0, DIGIT
    repeat
      unit = unit / chunk
      local part = math.floor(digit / unit)
      digit = digit - part * unit
      rest = rest * chunk + part
      local times_in = math.floor(rest / by)
      rest = rest - times_in * by
      whole = whole * chunk + times_in
    until unit == 1
    quotient[at] = whole
  end
  return quotient, rest
end

-- Returns a list's number: exact below 2^53, rounded above.
local function number_of(list)
  local number = 0
  for at = #list, 1, -1 do number = number * DIGIT + list[at] end
  return number
end

-- Whether a number has more than 128 bits.
local function is_beyond_128(list)
  for at = #list, 7, -1 do
    if list[at] > 0 then return true end
  end
  return (list[6] or 0) >= 256
end
