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

-- Adds a number below 2^52.
local function plus(list, number)
  local sum, carry, at = {}, number, 1
  while list[at] or carry > 0 do
    local digit = (list[at] or 0) + carry
    sum[at] = digit % DIGIT
    carry, at = (digit - sum[at]) / DIGIT, at + 1
  end
  return sum
end

local function times(list, number)
  local product = {}
  for shift, by in ipairs(digits(number)) do
    local carry, at = 0, 1
    while list[at] or carry > 0 do
      local place = at + shift - 1
      local sum = (list[at] or 0) * by + (product[place] or 0) + carry
      product[place] = sum % DIGIT
      carry, at = (sum - product[place]) / DIGIT, at + 1
    end
  end
  return product
end

-- Returns the quotient and the rest, by long division in bits. The divisor is from 1 to below 2^52.
local function divide(list, by)
  local quotient, rest = {}, 0
  for at = #list, 1, -1 do
    local digit, whole, bit = list[at], 0, DIGIT
    repeat
      bit, rest, whole = bit / 2, rest * 2, whole * 2
      if digit >= bit then digit, rest = digit - bit, rest + 1 end
      if rest >= by then rest, whole = rest - by, whole + 1 end
    until bit == 1
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
