-- ARGV: cursor, most entries, most bytes, least age in ms. Returns {cursor, n, data} of trajectories after the cursor; at least one, if
-- there is one of that age: a younger one may still be forgotten and come again under another cursor, to be trained on twice.
-- One that is younger still than new was written before the clock was set back, or by another server: it counts as old.
-- A cursor that was forgotten is none: they come from the first on.
local out, bytes, last, least = {}, 0, ARGV[1], tonumber(ARGV[4])
while #out < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', TRAJECTORIES, '(' .. last, '+', 'COUNT', 1)[1]
  if not entry and #out == 0 and forgotten(TRAJECTORIES, last) then entry = redis.call('XRANGE', TRAJECTORIES, '-', '+', 'COUNT', 1)[1] end
  if not entry or (least > 0 and math.abs(now_ms() - tonumber(entry[2][6])) < least) then break end
  last = entry[1]
  out[#out + 1] = {last, entry[2][2], entry[2][4]}
  bytes = bytes + #entry[2][4]
end
return out
