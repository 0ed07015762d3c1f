-- ARGV: term, role, fence, quota in bytes, most open rollouts, this call's number (0: none), the first number that is not settled,
-- the rollouts' step ('' for none), the first step that is not over, the owner of the client's key ('' for none), what is added to the
-- two debts of its account, tokens a minute that pay off the second one, as JSON the prompt's tokens and the most tokens of each rollout in
-- turn, then id, digests, kind, req, prompt, origin, bytes of scores of each. The digests are that of its body, and perhaps one of its
-- client's request. The origin is its group, episode and turn with spaces between them, for its spans. The bytes are what the scores of its
-- prompt will take, 0 if it is not scored: they count towards the quota from here on.
-- Queues rollouts: all or nothing. Returns per rollout {1, place in the queue}, {2, state} for a known one, {3, ''} for one that is over.
-- New rollouts of a key are charged to its account.
-- A rollout that is not here is over, and not new, in three cases: it is marked; its step is over; this call was taken before, or its
-- number is settled, so that nobody waits for it.
local SUBMITTED = {train = 'submitted', eval = 'eval_submitted', request = 'requests_submitted'}
local BODY_DIGEST = 16  -- bytes
local FIRST, COLUMNS = 15, 7  -- where the rollouts begin, and what each has
local MARKS_AT_ONCE = 4096  -- some milliseconds
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local taken, number, step = SUBMITS .. ARGV[2], tonumber(ARGV[6]), ARGV[8]
local fence, settled = string.match(redis.call('HGET', FENCE, 'settled:' .. ARGV[2]) or '', '^(%S+) (%d+)$')
settled = fence == ARGV[3] and tonumber(settled) or 0  -- each lease counts from 1
history_limit()  -- and the first step
local repeated = number > 0 and (number < settled or (fence == ARGV[3] and redis.call('ZSCORE', taken, number)))
local past = repeated or (step ~= '' and tonumber(step) < first_step)

-- Reserves what new rollouts may come to.
local function charge(fresh)
  local owner, held = ARGV[10] .. ':', cjson.decode(ARGV[14])
  local function add(name, by) return redis.call('HINCRBY', ACCOUNTS, owner .. name, by) end
  if redis.call('HEXISTS', ACCOUNTS, owner .. 'requests') == 0 then
    count('bytes', ACCOUNT_BYTES)
    redis.call('HINCRBY', ACCOUNTS, 'owners', 1)
  end
  local opened, reserved = 0, 0
  for _, at in ipairs(fresh) do
    local place = (at - FIRST) / COLUMNS * 2
    local group = string.match(ARGV[at + 5], '^%S+')
    redis.call('HSET', ROLLOUT .. ARGV[at], 'account', ARGV[10], 'prompt_charge', held[place + 1], 'held', held[place + 2],
      'rate', ARGV[13], 'charged', age())
    reserved = reserved + held[place + 2]
    if add('g:' .. group, 1) == 1 then opened = opened + 1 end
  end
  add('requests', opened)
  add('open', opened)
  add('reserved', reserved)
  add('request_debt', ARGV[11])
  add('token_debt', ARGV[12])
  redis.call('HSET', ACCOUNTS, owner .. 'at', age())
end

local out, fresh, seen, bytes = {}, {}, {}, 0
for at = FIRST, #ARGV, COLUMNS do
  local id, digests = ARGV[at], ARGV[at + 1]
  local have = redis.call('HMGET', ROLLOUT .. id, 'digest', 'state', 'asked')
  local known = have[1] and have[1] .. (have[3] or '') or seen[id]
  if known and known ~= digests then return refuse('TAKEN', tostring((at - FIRST) / COLUMNS)) end
  if known then out[#out + 1] = {2, have[2] or 'queued'}
  elseif past or is_over(id, ARGV[at + 2]) then out[#out + 1] = {3, ''}
  else
    seen[id] = digests
    bytes = bytes + #ARGV[at + 4] + tonumber(ARGV[at + 6])
    fresh[#fresh + 1] = at
    out[#out + 1] = {1, 0}
  end
end
if #fresh > 0 then
  if beyond_quota(bytes, ARGV[4], ARGV[2]) then  -- perhaps by ids of steps that are over, which nothing but a submit says
    raise_first_step(tonumber(ARGV[9]))
    drop_marks(MARKS_AT_ONCE)
  end
  local full = beyond_quota(bytes, ARGV[4], ARGV[2]); if full then return full end
  local open = redis.call('ZCARD', OPEN)
  if open + #fresh > part_of(ARGV[5], ARGV[2]) then return refuse('QUEUE', tostring(open)) end
  local seq = redis.call('HINCRBY', RUN, 'seq', #fresh) - #fresh
  for i, at in ipairs(fresh) do
    local id, asked = ARGV[at], string.sub(ARGV[at + 1], BODY_DIGEST + 1)
    redis.call('HSET', ROLLOUT .. id, 'digest', string.sub(seen[id], 1, BODY_DIGEST), 'kind', ARGV[at + 2], 'req', ARGV[at + 3],
      'prompt', ARGV[at + 4], 'origin', ARGV[at + 5], 'state', 'queued', 'attempts', 0, 'barren', 0)
    if asked ~= '' then redis.call('HSET', ROLLOUT .. id, 'asked', asked) end
    if ARGV[at + 6] ~= '0' then redis.call('HSET', ROLLOUT .. id, 'scores', ARGV[at + 6]) end
    if step ~= '' then redis.call('HSET', ROLLOUT .. id, 'step', step) end
    redis.call('ZADD', OPEN, seq + i, id)
    out[(at - FIRST) / COLUMNS + 1][2] = seq + i
    count(SUBMITTED[ARGV[at + 2]], 1)
  end
  if ARGV[10] ~= '' then charge(fresh) end
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
raise_first_step(tonumber(ARGV[9]))
return out
