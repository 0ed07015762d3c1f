-- ARGV: term. Takes over a live run for a coordinator that begins to lead. Returns 1 if the run is live.
local bad = deposed(ARGV[1]); if bad then return bad end
if redis.call('EXISTS', FENCE) == 0 then return 0 end
redis.call('HSET', FENCE, 'term', ARGV[1])
return 1
