-- ARGV: term, role, fence. Returns the next version number.
local bad = barred(ARGV[1], ARGV[2], ARGV[3])
if bad then return bad end
return redis.call('HINCRBY', RUN, 'version', 1)
