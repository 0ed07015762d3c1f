-- ARGV: term, role, fence, then cursor, drop reason ('' if trained) of each. Ends trajectories. Missing cursors were committed before.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local ended = 0
for at = 4, #ARGV, 2 do
  local entry = redis.call('XRANGE', TRAJECTORIES, ARGV[at], ARGV[at])[1]
  if entry then
    local n = tonumber(entry[2][2])
    redis.call('XDEL', TRAJECTORIES, ARGV[at])
    if ARGV[at + 1] == '' then count('trained', n)
    else count('dropped', n); count('dropped:' .. ARGV[at + 1], n) end
    count('trajectories', -n)
    count('bytes', -#entry[2][4])
    ended = ended + 1
  end
end
settle()
return ended
