-- ARGV: term, role, fence, reason, then ids. Ends rollouts in any state; unknown ones and those that are over are skipped. Requests
-- finish as cancelled, and their tokens stay; a gateway's lease ends nothing else. Returns id, attempt or '' of each that was open,
-- in turn; of training and evaluation only those that ran.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local ran, kinds = {}, {}
for at = 5, #ARGV do
  kinds[at] = redis.call('HGET', ROLLOUT .. ARGV[at], 'kind')
  if kinds[at] and kinds[at] ~= 'request' and of_gateway(ARGV[2]) then return refuse('KIND', tostring(at - 5)) end
end
for at = 5, #ARGV do
  local id = ARGV[at]
  if kinds[at] == 'request' then
    local attempt = cancel_request(id, ARGV[4])
    if attempt then ran[#ran + 1] = id; ran[#ran + 1] = attempt end
  elseif redis.call('EXISTS', ROLLOUT .. id) == 1 then
    local attempt = forget(id)
    if attempt then ran[#ran + 1] = id; ran[#ran + 1] = attempt end
    close(kinds[at], ARGV[4])
  end
end
settle()
return ran
