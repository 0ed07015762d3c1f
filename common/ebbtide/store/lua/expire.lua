-- ARGV: term, ms that finished requests and ended sessions are kept, and the marks of both, ms after which an unused session is dropped, most of each at once.
-- Deletes what is due; a session with an open rollout is in use, and counts as used now. Returns {how many were due, 1 if requests or sessions are left, then id, attempt or '' of each rollout that was open, in turn}.
local MOST_SESSIONS = 4  -- each may have thousands of rollouts
local bad = barred(ARGV[1]); if bad then return bad end
local out, due = {0, 0}, 0
local function older(key, ms, most) return redis.call('ZRANGEBYSCORE', key, '-inf', age() - ms, 'LIMIT', 0, most) end
for _, id in ipairs(older(REQUESTS, ARGV[2], ARGV[4])) do
  forget(id)
  due = due + 1
end
for _, id in ipairs(older(IDLE, ARGV[3], MOST_SESSIONS)) do
  if has_open_rollout(id) then  -- its client still gets an answer, or waits for one
    redis.call('ZREM', IDLE, id)  -- first: a store that is out of memory allows it, and then the next
    redis.call('ZADD', IDLE, age(), id)
  else
    local waits = redis.call('HGET', SESSION .. id, 'state') == 'verifying'
    end_session(id, 'dropped', waits and 'unverified' or 'abandoned', out)
    if not waits then count('sessions_abandoned', 1) end
  end
  due = due + 1
end
for _, id in ipairs(older(OVER, ARGV[2], ARGV[4])) do
  count('bytes', -tonumber(redis.call('HGET', SESSION .. id, 'held')))
  redis.call('ZREM', OWNED .. (redis.call('HGET', SESSION .. id, 'owner') or ''), id)
  redis.call('UNLINK', SESSION .. id)
  redis.call('ZREM', SESSIONS, id)
  redis.call('ZREM', OVER, id)
  mark_gone('s:' .. id)
  due = due + 1
end
for _, mark in ipairs(older(GONE, ARGV[2], ARGV[4])) do
  redis.call('ZREM', GONE, mark)
  count('bytes', -MARK_BYTES)
  due = due + 1
end
settle()
local r = redis.call('HMGET', COUNT, 'requests_submitted', 'requests_completed')
local left = tonumber(r[1] or 0) - tonumber(r[2] or 0)
for _, key in ipairs({REQUESTS, SESSIONS, GONE}) do left = left + redis.call('ZCARD', key) end
out[1], out[2] = due, left > 0 and 1 or 0
return out
