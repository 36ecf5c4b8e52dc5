#pragma once

#include "backend.h"

namespace flash_dmattn::reference {

extern const KvBackend kv_backend;

PlanFunction<ScoreProjectionArgs> find_score_projection(const ScoreProjectionArgs& args,
                                                        std::string& reason);

}  // namespace flash_dmattn::reference
