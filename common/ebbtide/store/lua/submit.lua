-- ARGV: term, role, fence, quota in bytes, most open rollouts, then id, digest, kind, req, prompt of each.
-- Queues rollouts: all or nothing. Returns per rollout {1, place in the queue}, {2, state} for a known one, {3, ''} for one that is over.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local out, fresh, seen, bytes = {}, {}, {}, 0
for at = 6, #ARGV, 5 do
  local id, digest = ARGV[at], ARGV[at + 1]
  local have = redis.call('HMGET', ROLLOUT .. id, 'digest', 'state')
  local known = have[1] or seen[id]
  if known and known ~= digest then return refuse('TAKEN', tostring((at - 6) / 5)) end
  if known then out[#out + 1] = {2, have[2] or 'queued'}
  elseif redis.call('SISMEMBER', DONE, 'r:' .. id) == 1 then out[#out + 1] = {3, ''}
  else
    seen[id] = digest
    bytes = bytes + #ARGV[at + 4]
    fresh[#fresh + 1] = at
    out[#out + 1] = {1, 0}
  end
end
if #fresh == 0 then return out end
local used = tonumber(redis.call('HGET', COUNT, 'bytes') or 0)
if used + bytes > tonumber(ARGV[4]) then return refuse('QUOTA', tostring(used)) end
local open = redis.call('ZCARD', OPEN)
if open + #fresh > tonumber(ARGV[5]) then return refuse('QUEUE', tostring(open)) end
local seq = redis.call('HINCRBY', RUN, 'seq', #fresh) - #fresh
for i, at in ipairs(fresh) do
  redis.call('HSET', ROLLOUT .. ARGV[at], 'digest', ARGV[at + 1], 'kind', ARGV[at + 2], 'req', ARGV[at + 3],
    'prompt', ARGV[at + 4], 'state', 'queued', 'attempts', 0, 'barren', 0)
  redis.call('ZADD', OPEN, seq + i, ARGV[at])
  out[(at - 6) / 5 + 1][2] = seq + i
  count(ARGV[at + 2] == 'train' and 'submitted' or 'eval_submitted', 1)
end
count('queued', #fresh)
count('bytes', bytes)
settle()
return out
