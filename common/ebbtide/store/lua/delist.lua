-- ARGV: term, run. Takes a run whose record has expired off the fleet's list.
local bad = deposed(ARGV[1])
if bad then return bad end
return redis.call('ZREM', INDEX, ARGV[2])
