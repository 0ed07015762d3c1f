-- ARGV: none. Returns {bytes that count towards the run's quota, uncommitted trajectories, open sessions}.
local r = redis.call('HMGET', COUNT, 'bytes', 'trajectories')
return {tonumber(r[1] or 0) + history(), tonumber(r[2] or 0), redis.call('ZCARD', IDLE)}
