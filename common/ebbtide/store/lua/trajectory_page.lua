-- ARGV: cursor, most entries, most bytes, time in ms before which all are durable (-1: all are), least age in ms. Returns {cursor,
-- n, data} of durable trajectories after the cursor; at least one, if there is one. The store may still forget a younger one, which would then come again under another cursor and be trained
-- on twice. One from the future was written before the clock was set back, or by another server: it counts as old. If the store forgot
-- the cursor, they come from the first one on.
local out, bytes, last, before, least = {}, 0, ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
while #out < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', TRAJECTORIES, '(' .. last, '+', 'COUNT', 1)[1]
  if not entry and #out == 0 and forgotten(TRAJECTORIES, last) then entry = redis.call('XRANGE', TRAJECTORIES, '-', '+', 'COUNT', 1)[1] end
  if not entry then break end
  local at, now = tonumber(entry[2][6]), now_ms()
  if math.abs(now - at) < least or (before >= 0 and at >= before and at - now <= now - before) then break end
  last = entry[1]
  out[#out + 1] = {last, entry[2][2], entry[2][4]}
  bytes = bytes + #entry[2][4]
end
return out
