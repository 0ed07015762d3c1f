-- ARGV: term, run. Removes a run whose record has expired from the fleet's list. Returns 1, or 0 if it has a record or is not there.
local bad = deposed(ARGV[1]); if bad then return bad end
if redis.call('EXISTS', RUN) == 1 then return 0 end
return redis.call('ZREM', INDEX, ARGV[2])
