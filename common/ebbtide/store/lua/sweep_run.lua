-- ARGV: term, how many rollouts at most. Deletes a page of an ended run's data. Returns how many rollouts and sessions; 0: all is gone.
local bad = deposed(ARGV[1]); if bad then return bad end
if redis.call('EXISTS', FENCE) == 1 then return refuse('LIVE') end
local gone = 0
for _, id in ipairs(redis.call('ZRANGE', OPEN, 0, ARGV[2] - 1)) do
  redis.call('DEL', ROLLOUT .. id, TOKENS .. id)
  redis.call('ZREM', OPEN, id)
  gone = gone + 1
end
for _, entry in ipairs(redis.call('XRANGE', FINISHED, '-', '+', 'COUNT', ARGV[2])) do
  redis.call('DEL', ROLLOUT .. entry[2][2], TOKENS .. entry[2][2])
  redis.call('XDEL', FINISHED, entry[1])
  gone = gone + 1
end
for _, id in ipairs(redis.call('ZRANGE', REQUESTS, 0, ARGV[2] - 1)) do
  redis.call('DEL', ROLLOUT .. id, TOKENS .. id)
  redis.call('ZREM', REQUESTS, id)
  gone = gone + 1
end
for _, id in ipairs(redis.call('ZRANGE', SESSIONS, 0, ARGV[2] - 1)) do
  redis.call('ZREM', OWNED .. (redis.call('HGET', SESSION .. id, 'owner') or ''), id)
  redis.call('UNLINK', SESSION .. id, TURNS .. id, TURN_IDS .. id, KEPT .. id, BRANCHES .. id)
  redis.call('ZREM', SESSIONS, id)
  gone = gone + 1
end
if gone == 0 then
  redis.call('UNLINK', OPEN, FINISHED, TRAJECTORIES, DONE, DONE_ORDER, VERSIONS, REQUESTS, SESSIONS, IDLE, OVER, KEPT_BY, GONE,
    UNVERIFIED)
end
return gone
