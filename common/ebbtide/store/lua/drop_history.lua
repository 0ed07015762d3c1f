-- ARGV: term. Deletes the events and spans of an ended run. Its record stays. Returns 1, or 0 if it is live.
local bad = deposed(ARGV[1]); if bad then return bad end
if redis.call('EXISTS', FENCE) == 1 then return 0 end
redis.call('UNLINK', EVENTS, CHATTER, SPANS, REQUEST_SPANS)
redis.call('HDEL', RUN, 'facts', 'chatter')
return 1
