-- ARGV: term, role, fence, owner, session of which the rollouts' requests are turns ('' for none), then id, group of rollouts. Returns
-- {spent, today, reserved, open, request debt, token debt, ms since the debts were written, s until midnight, 1 if the account is there,
-- all accounts}, and for each rollout 0 if it is not new, 1 if it is, 2 if its request is, too. Those of a turn that is stored are not new.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local owner = ARGV[4] .. ':'
local names = {'spent', 'today', 'reserved', 'open', 'request_debt', 'token_debt', 'at', 'day', 'requests'}
for i, name in ipairs(names) do names[i] = owner .. name end
local r = redis.call('HMGET', ACCOUNTS, unpack(names))
local day, seconds = today()
local out = {}
for i = 1, 6 do out[i] = tonumber(r[i] or 0) end
if tonumber(r[8] or 0) ~= day then out[2] = 0 end
out[7] = r[7] and age() - r[7] or 0
out[8] = 86400 - seconds
out[9] = r[9] and 1 or 0
out[10] = tonumber(redis.call('HGET', ACCOUNTS, 'owners') or 0)
local turns = ARGV[5] ~= '' and TURN_IDS .. ARGV[5]
for at = 6, #ARGV, 2 do
  local known = redis.call('EXISTS', ROLLOUT .. ARGV[at]) == 1 or is_over(ARGV[at])
    or (turns and redis.call('HEXISTS', turns, ARGV[at + 1]) == 1)
  local open = redis.call('HEXISTS', ACCOUNTS, owner .. 'g:' .. ARGV[at + 1]) == 1
  out[#out + 1] = known and 0 or open and 1 or 2
end
return out
