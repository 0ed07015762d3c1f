-- ARGV: term, role, fence, episode, drop reason, packed trajectory or '', trusted ('1': the driver saw that its rollouts
-- finished, which the store may have forgotten), then its rollouts' ids. Ends an episode, once; all or nothing.
-- Returns {1 or 0 for a repeat, id, attempt of each rollout that still ran}.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local mark, reason, data = 'e:' .. ARGV[4], ARGV[5], ARGV[6]
if redis.call('SISMEMBER', DONE, mark) == 1 then return {0} end
local kinds, ids, train, step = {}, {}, 0, nil
for at = 8, #ARGV do
  local id = ARGV[at]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'kind', 'step')
  if r[2] == 'request' then return refuse('UNKNOWN', tostring(at - 8)) end  -- its gateway's
  if r[1] and not kinds[id] then
    if r[1] ~= 'finished' and reason == '' and ARGV[7] ~= '1' then return refuse('OPEN', tostring(at - 8)) end
    kinds[id] = r[2]
    ids[#ids + 1] = id
    step = r[3] or step
    if r[2] == 'train' then train = train + 1 end
  elseif not r[1] and redis.call('SISMEMBER', DONE, 'r:' .. id) == 0 then
    return refuse('UNKNOWN', tostring(at - 8))
  end
end
if reason == '' and (train > 0) ~= (data ~= '') then return refuse('TRAJECTORY', tostring(train)) end
local out = {1}
for _, id in ipairs(ids) do
  local attempt = forget(id)
  if attempt then out[#out + 1] = id; out[#out + 1] = attempt end
  if data == '' then close(kinds[id], reason)
  elseif kinds[id] ~= 'train' then count('eval_completed', 1) end
end
mark_over(mark, step)
if data ~= '' then
  redis.call('XADD', TRAJECTORIES, '*', 'n', train, 'data', data, 'at', string.format('%.0f', now_ms()))
  count('trajectories', train)
  count('bytes', #data)
end
settle()
return out
