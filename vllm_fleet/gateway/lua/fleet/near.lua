-- Which known names are nearest to one that is unknown, for messages.

local M = {}

local LONGEST = 128  -- characters compared

-- How many letters must be put in, taken out or changed to make one text of the other.
function M.distance(a, b)
  a, b = a:sub(1, LONGEST), b:sub(1, LONGEST)
  local row = {}
  for j = 0, #b do
    row[j] = j
  end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local change = diagonal + (a:byte(i) == b:byte(j) and 0 or 1)
      diagonal = row[j]
      row[j] = math.min(change, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#b]
end

-- At most `most` of `names`, the nearest first; of HOST/NAME also the last part alone is compared.
-- What differs in more than half of its letters is no hint.
function M.nearest(text, names, most)
  local found = {}
  for at, name in ipairs(names) do
    local whole = M.distance(text, name)
    local part = name:match("/(.*)$")
    local near = part and math.min(whole, M.distance(text, part)) or whole
    if near <= math.max(#text, 4) / 2 then
      found[#found + 1] = {name = name, near = near, at = at}
    end
  end
  table.sort(found, function(a, b)
    if a.near ~= b.near then
      return a.near < b.near
    end
    return a.at < b.at
  end)
  local out = {}
  for i = 1, math.min(most, #found) do
    out[i] = found[i].name
  end
  return out
end

return M
