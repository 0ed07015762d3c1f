-- ARGV: term, role, fence, quota in bytes, most open rollouts, this call's number (0: none), the first number that is not settled,
-- the rollouts' step ('' for none), the first step that is not over, then id, digest, kind, req, prompt, origin of each. The origin is
-- its group, episode and turn with spaces between them, for its spans.
-- Queues rollouts: all or nothing. Returns per rollout {1, place in the queue}, {2, state} for a known one, {3, ''} for one that is over.
-- A rollout that is not here is over, and not new, in three cases: it is marked; its step is over; this call was taken before, or its
-- number is settled, so that nobody waits for it.
local SUBMITTED = {train = 'submitted', eval = 'eval_submitted', request = 'requests_submitted'}
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local taken, number, step = SUBMITS .. ARGV[2], tonumber(ARGV[6]), ARGV[8]
local fence, settled = string.match(redis.call('HGET', FENCE, 'settled:' .. ARGV[2]) or '', '^(%S+) (%d+)$')
settled = fence == ARGV[3] and tonumber(settled) or 0  -- each lease counts from 1
history_limit()  -- and the first step
local repeated = number > 0 and (number < settled or (fence == ARGV[3] and redis.call('ZSCORE', taken, number)))
local past = repeated or (step ~= '' and tonumber(step) < first_step)
local out, fresh, seen, bytes = {}, {}, {}, 0
for at = 10, #ARGV, 6 do
  local id, digest = ARGV[at], ARGV[at + 1]
  local have = redis.call('HMGET', ROLLOUT .. id, 'digest', 'state')
  local known = have[1] or seen[id]
  if known and known ~= digest then return refuse('TAKEN', tostring((at - 10) / 6)) end
  if known then out[#out + 1] = {2, have[2] or 'queued'}
  elseif past or is_over(id, ARGV[at + 2]) then out[#out + 1] = {3, ''}
  else
    seen[id] = digest
    bytes = bytes + #ARGV[at + 4]
    fresh[#fresh + 1] = at
    out[#out + 1] = {1, 0}
  end
end
if #fresh > 0 then
  redis.call('HSETNX', RUN, 'kept', history_limit_of(ARGV[4]))  -- the run may be of the former release, which kept more
  redis.call('XTRIM', SPANS, 'MAXLEN', '~', history_limit_of(ARGV[4]))
  local full = beyond_quota(bytes, ARGV[4], ARGV[2]); if full then return full end
  local open = redis.call('ZCARD', OPEN)
  if open + #fresh > part_of(ARGV[5], ARGV[2]) then return refuse('QUEUE', tostring(open)) end
  local seq = redis.call('HINCRBY', RUN, 'seq', #fresh) - #fresh
  for i, at in ipairs(fresh) do
    redis.call('HSET', ROLLOUT .. ARGV[at], 'digest', ARGV[at + 1], 'kind', ARGV[at + 2], 'req', ARGV[at + 3],
      'prompt', ARGV[at + 4], 'origin', ARGV[at + 5], 'state', 'queued', 'attempts', 0, 'barren', 0)
    if step ~= '' then redis.call('HSET', ROLLOUT .. ARGV[at], 'step', step) end
    redis.call('ZADD', OPEN, seq + i, ARGV[at])
    out[(at - 10) / 6 + 1][2] = seq + i
    count(SUBMITTED[ARGV[at + 2]], 1)
  end
  count('queued', #fresh)
  count('bytes', bytes)
  settle()
end
if number > 0 and not repeated then
  -- First a deletion: a full store takes these few bytes, too, when a new driver asks for what is here already.
  if fence ~= ARGV[3] then redis.call('DEL', taken)
  else redis.call('ZREMRANGEBYSCORE', taken, '-inf', '(' .. ARGV[7]) end
  redis.call('ZADD', taken, number, number)
  redis.call('HSET', FENCE, 'settled:' .. ARGV[2], ARGV[3] .. ' ' .. string.format('%.0f', math.max(settled, tonumber(ARGV[7]))))
end
if tonumber(ARGV[9]) > first_step then redis.call('HSET', RUN, 'first_step', ARGV[9]) end
return out
