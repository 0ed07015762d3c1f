-- ARGV: term, role, fence. Reserves the next version number and returns it.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
return redis.call('HINCRBY', RUN, 'version', 1)
