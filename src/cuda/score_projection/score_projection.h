#pragma once

#include <string>

#include "backend.h"

namespace flash_dmattn::cuda {

PlanFunction<ScoreProjectionArgs> find_score_projection(const ScoreProjectionArgs& args,
                                                        std::string& reason);

}  // namespace flash_dmattn::cuda
