-- ARGV: term, role, fence, reason, then ids. Ends rollouts in any state; unknown ones and those that are over are
-- skipped. Returns id, attempt of each that ran, in turn.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local ran = {}
for at = 5, #ARGV do
  local id = ARGV[at]
  local kind = redis.call('HGET', ROLLOUT .. id, 'kind')
  if kind then
    local attempt = forget(id)
    if attempt then ran[#ran + 1] = id; ran[#ran + 1] = attempt end
    close(kind, ARGV[4])
  end
end
settle()
return ran
