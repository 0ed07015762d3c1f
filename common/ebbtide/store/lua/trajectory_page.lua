-- ARGV: cursor, most entries, most bytes, least age in ms. Returns {cursor, n, data} of trajectories after the cursor; at least one, if
-- there is one of that age: a younger one may still be forgotten and come again under another cursor, to be trained on twice.
local out, bytes, last = {}, 0, ARGV[1]
while #out < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', TRAJECTORIES, '(' .. last, '+', 'COUNT', 1)[1]
  if not entry or (ARGV[4] ~= '0' and now_ms() - tonumber(entry[2][6]) < tonumber(ARGV[4])) then break end
  last = entry[1]
  out[#out + 1] = {last, entry[2][2], entry[2][4]}
  bytes = bytes + #entry[2][4]
end
return out
