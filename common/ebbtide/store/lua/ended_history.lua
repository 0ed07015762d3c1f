-- ARGV: none. Returns {when the run ended (ms), bytes of its events and spans}, or false if it is live or gone.
local r = redis.call('HMGET', RUN, 'ended', 'created')
if not r[2] or redis.call('EXISTS', FENCE) == 1 then return false end
return {r[1] or r[2], history()}
